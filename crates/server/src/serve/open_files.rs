//! Every connection is an open file, and a process may open only so many.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What the store, the logs and the listener need besides connections.
const RESERVED: usize = 256;

/// How many of these connections there can be, once the process has asked for as many open files as they take. The system
/// gives a process few at first, and more if it asks.
pub(super) fn room_for(connections: usize) -> usize {
    let wanted = u64::try_from(connections.saturating_add(RESERVED)).unwrap_or(u64::MAX);
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= wanted) {
        return connections;
    }
    let asked = maximum.map_or(wanted, |most| most.min(wanted));
    let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(asked), maximum });
    let has = if raised.is_ok() { asked } else { current.unwrap_or(asked) };
    let room = usize::try_from(has).unwrap_or(usize::MAX).saturating_sub(RESERVED).max(1);
    if room < connections {
        tracing::warn!(
            "room for {room} connections instead of {connections}: more open files need a higher `ulimit -n`"
        );
    }
    room.min(connections)
}
