//! The key of a timer as columns of a SQL table, which sort like the keys.

use eddyline_machine::{ActId, Fence, TimerKey, TimerKind};

pub(crate) fn columns(key: TimerKey) -> (i64, i32, i64) {
    let (kind, fence) = match key.kind {
        TimerKind::Delay => (0, 0),
        TimerKind::Deadline => (1, 0),
        TimerKind::Gate => (2, 0),
        TimerKind::BackOff(fence) => (3, fence.0 as i64),
        TimerKind::Finally => (4, 0),
    };
    (i64::from(key.activation.0), kind, fence)
}

pub(crate) fn key(activation: i64, kind: i32, fence: i64) -> Option<TimerKey> {
    let kind = match kind {
        0 => TimerKind::Delay,
        1 => TimerKind::Deadline,
        2 => TimerKind::Gate,
        3 => TimerKind::BackOff(Fence(fence as u64)),
        4 => TimerKind::Finally,
        _ => return None,
    };
    Some(TimerKey { activation: ActId(u32::try_from(activation).ok()?), kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_restore_the_key_and_sort_like_it() {
        let kinds = [
            TimerKind::Delay,
            TimerKind::Deadline,
            TimerKind::Gate,
            TimerKind::BackOff(Fence(1)),
            TimerKind::BackOff(Fence(2)),
            TimerKind::Finally,
        ];
        let keys: Vec<TimerKey> =
            (0..2).flat_map(|at| kinds.map(|kind| TimerKey { activation: ActId(at), kind })).collect();
        assert!(keys.is_sorted());
        assert!(keys.iter().map(|key| columns(*key)).is_sorted());
        for wanted in keys {
            let (activation, kind, fence) = columns(wanted);
            assert_eq!(key(activation, kind, fence), Some(wanted));
        }
        assert_eq!(key(0, 9, 0), None);
    }
}
