//! The version of a definition: a hash of its content.

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

/// Builds the canonical form from the fields as read: `worker` becomes `run`, durations become milliseconds, `emits`
/// becomes a map. Fields without effect (`description`, `entry`, empty lists) are dropped. Defaults are not filled in,
/// so that they can change without changing the version of registered flows.
///
/// Keys are sorted, so that equal content has equal text.
pub(super) fn seal(fields: Map<String, Value>) -> (Value, String) {
    let mut canonical = Value::Object(fields);
    // A no-op by serde_json's default, but any crate in a build may turn on its `preserve_order`.
    canonical.sort_all_objects();
    let hash = Sha256::digest(canonical.to_string());
    let version = hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    (canonical, version)
}
