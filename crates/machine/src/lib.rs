//! The run state machine, the heart of Eddyline. `eddyline-language` defines what a flow is.
//!
//! Everything here is pure: no async, IO, clock, randomness, logging or configuration. [`decide`] takes a flow, a run
//! and inputs, and returns one [`Transition`], which a store commits or rejects as a whole.

pub mod decide;
pub mod explain;
pub mod failure;
pub mod ids;
pub mod memo;
pub mod project;
pub mod record;
pub mod run;
pub mod transition;
pub mod view;
pub mod wire;

pub use decide::{Canonical, Env, Halt, canonical_json, decide};
pub use eddyline_language::{Data, Unbuilt, ValueRef, flow::*};
pub use failure::Failure;
pub use ids::*;
pub use record::{Entry, Numbered, Record};
pub use run::{Run, Status};
pub use transition::*;
