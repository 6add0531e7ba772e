//! Flow definitions: parses a definition's text into a [`Flow`] or a list of problems ([`definition`]), and evaluates
//! expressions and templates ([`expr`]) over payloads ([`data`]).
//!
//! Everything here is pure: no async, IO, clock, randomness, logging or configuration.

pub mod data;
pub mod definition;
pub mod expr;
pub mod flow;
pub mod ids;
pub mod nearest;
pub mod time;

pub use data::{Data, RoughSize, Unbuilt, ValueRef};
pub use flow::*;
pub use ids::*;
