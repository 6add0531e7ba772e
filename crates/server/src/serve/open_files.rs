//! Raises the limit of open files: every connection is one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Open files that the store, the logs and the listener need besides connections.
const RESERVED: usize = 256;

/// Raises the soft limit as far as needed and possible, and returns how many of the wanted connections fit.
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
        tracing::warn!("the limit of open files allows {room} connections instead of {connections}; raise `ulimit -n`");
    }
    room.min(connections)
}
