//! The version of a definition, by content.

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

/// The canonical form, from the fields as they were read: `worker` is `run`, durations are milliseconds, events are a
/// map; what says nothing (`description`, `entry`, empty lists) is not there, and defaults are not filled in, so that
/// they may be given a new value without changing the version of what is registered.
///
/// Keys are sorted, so that one content is one text.
pub(super) fn seal(fields: Map<String, Value>) -> (Value, String) {
    let mut canonical = Value::Object(fields);
    // Of no effect by serde_json's default; but any crate of a build may turn its `preserve_order` on.
    canonical.sort_all_objects();
    let hash = Sha256::digest(canonical.to_string());
    let version = hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    (canonical, version)
}
