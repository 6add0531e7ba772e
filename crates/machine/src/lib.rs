//! The heart of Eddyline: definitions, graph analysis and the run state machine.
//!
//! Everything here is pure: no async, IO, clock, randomness, logging or configuration. [`decide`] takes a flow, a run
//! and what happens to it, and gives back one [`Transition`], which a store commits or refuses as a whole.

pub mod data;
pub mod decide;
pub mod definition;
pub mod explain;
pub mod expr;
pub mod failure;
pub mod flow;
pub mod ids;
pub mod memo;
pub mod nearest;
pub mod project;
pub mod record;
pub mod run;
pub mod time;
pub mod transition;
pub mod view;
pub mod wire;

pub use data::{Data, Unbuilt, ValueRef};
pub use decide::{Canonical, Env, Halt, canonical_json, decide};
pub use failure::Failure;
pub use flow::*;
pub use ids::*;
pub use record::{Entry, Numbered, Record};
pub use run::{Run, Status};
pub use transition::*;
