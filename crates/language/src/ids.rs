//! Newtypes for ids, so that a step id cannot be passed as a scope id.

/// Defines a newtype around an integer.
#[macro_export]
macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[derive(::serde::Serialize, ::serde::Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(
    /// A step of a definition: its index in [`crate::Graph::steps`].
    StepId(u32)
);
number!(
    /// A scope of a definition (the flow itself, a group, `finally`): its index in [`crate::Graph::scopes`].
    ScopeId(u32)
);
number!(
    /// A stored payload of a run, numbered densely, written once.
    ValueId(u32)
);

/// Milliseconds: of a duration, or since the Unix epoch.
pub type Millis = i64;
