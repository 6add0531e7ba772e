//! The engine of Eddyline: the loops that bring what was decided ([`eddyline_machine`]) and what is kept
//! ([`eddyline_store`]) together. Usable inside any process: see [`Engine`].

mod act;
mod assignment;
mod bus;
mod carry;
mod chore;
mod committer;
mod config;
mod dispatcher;
mod engine;
mod error;
mod events;
mod flows;
mod hot;
mod inbox;
mod instance;
mod lease_reaper;
mod read;
mod reconciler;
mod report;
mod retention;
mod shutdown;
mod start;
mod timers;
mod token;

pub use act::*;
pub use assignment::Assignment;
pub use config::*;
pub use engine::Engine;
pub use error::{EngineError, Result};
pub use events::{MAX_EVENTS, PublishRequest};
pub use flows::{FLOW, Registered, Registration, VERSION};
pub use read::*;
pub use report::{ClaimTasks, Reported, TaskReport, Waiting};
pub use start::{StartRequest, Started};
pub use token::{NotAToken, TaskToken};
