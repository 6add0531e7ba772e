//! The load: chains, diamonds, spreads, timers, gates, children, retries, undo, code.

/// The flows. Attempts are unlimited, so that kills do not fail steps.
pub const FLOWS: [&str; 8] = [
    r"
name: chain
steps:
  a: {retry: {attempts: -1, initial: 1ms}}
  b: {after: [a], retry: {attempts: -1, initial: 1ms}}
  c: {after: [b], retry: {attempts: -1, initial: 1ms}}
output: ${steps.c.output}
",
    r"
name: diamond
steps:
  top: {retry: {attempts: -1, initial: 1ms}, emits: [seen]}
  left: {after: [top], retry: {attempts: -1, initial: 1ms}}
  right: {subscribes: [seen], retry: {attempts: -1, initial: 1ms}}
  never: {after: [top], if: 'false', retry: {attempts: -1, initial: 1ms}}
  join: {after: [left, right, 'ended:never'], retry: {attempts: -1, initial: 1ms}}
",
    r"
name: fan
steps:
  each: {spread: input.items, as: item, max_parallel: 5, run: work, retry: {attempts: -1, initial: 1ms}}
  total: {after: [each], set: '${size(steps.each.output)}'}
output: ${steps.total.output}
",
    r"
name: nap
steps:
  sleep: {await: {time: 30ms}}
  after: {after: [sleep], retry: {attempts: -1, initial: 1ms}}
",
    r"
name: gate
steps:
  ask: {retry: {attempts: -1, initial: 1ms}}
  approve: {after: [ask], await: {webhook: true}}
  then: {after: [approve], retry: {attempts: -1, initial: 1ms}}
",
    r"
name: parent
steps:
  one: {flow: chain}
  two: {after: [one], flow: nap}
  last: {after: [two], retry: {attempts: -1, initial: 1ms}}
",
    r"
name: flaky
steps:
  try: {run: fails_twice, retry: {attempts: -1, initial: 2ms, max: 5ms}, undo: {run: undo}}
  end: {after: [try], fail: 'on purpose'}
",
    r#"{"name": "job", "code": true, "retry": {"attempts": -1, "initial": "1ms"}}"#,
];

/// The flows that are started, with their inputs.
pub const STARTS: [&str; 8] = ["chain", "diamond", "fan", "nap", "gate", "parent", "flaky", "job"];
