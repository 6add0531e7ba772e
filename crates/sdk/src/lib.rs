//! Durable flows from Rust: start and follow runs with a [`Client`], execute their steps with a [`Worker`].

mod backoff;
mod client;
mod error;
mod worker;

pub use client::*;
pub use eddyline_protocol as protocol;
pub use error::Error;
pub use http::Method;
pub use worker::{StepCtx, StepError, Worker};

/// Compiles the snippets of the guide with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/rust.md")]
struct Guide;
