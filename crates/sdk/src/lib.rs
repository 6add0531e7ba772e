//! Durable flows from Rust: start and follow runs with a [`Client`], execute their steps with a
//! [`Worker`], write them as ordinary functions with a [`RunCtx`].

mod backoff;
mod client;
mod code;
mod error;
#[cfg(feature = "test")]
pub mod testing;
mod worker;

pub use client::*;
pub use code::{
    Attempt, Bare, Call, Child, ChildFailed, CtxError, FlowError, FlowOptions, Gate, Inbox, Map, Name, OfItem, OrNone,
    Publish, Receive, Retry, RunCtx, Settled, Sleep, Spawn, Step, StepFailed, Wait, Webhook, With,
};
pub use eddyline_protocol as protocol;
pub use error::Error;
pub use http::Method;
pub use worker::{StepCtx, StepError, Worker};

/// Compiles the snippets of the guide with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/rust.md")]
struct Guide;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/code-flows.md")]
struct CodeFlowGuide;

#[cfg(all(doctest, feature = "test"))]
#[doc = include_str!("../../../docs/testing.md")]
struct TestingGuide;
