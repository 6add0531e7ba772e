//! Code flows to read and to copy from. Each module has one flow, the function that staffs a worker with it, and its tests.
//!
//! | module | shows |
//! |---|---|
//! | [`checkout`] | a saga: undo, an approval with reminders |
//! | [`agent`] | a loop of tools, and a person who may interrupt it |
//! | [`subscription`] | a run that lives for years: `continue_as_new` |
//! | [`crawl`] | a bounded number of steps at a time: `map` |
//! | [`fan_out`] | work for a pool of other workers: `call` |
//! | [`rate_limit`] | an API whose rate is limited per tenant |
//!
//! `cargo run -p eddyline-examples` starts a worker with all of them.

pub mod agent;
pub mod checkout;
pub mod crawl;
pub mod fan_out;
pub mod rate_limit;
pub mod subscription;

use eddyline::Worker;

/// A worker with all flows and handlers.
pub fn staff(worker: Worker) -> Worker {
    let all = [checkout::staff, agent::staff, subscription::staff, crawl::staff, fan_out::staff, rate_limit::staff];
    all.into_iter().fold(worker, |worker, staff| staff(worker))
}
