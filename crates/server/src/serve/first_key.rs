//! The first admin key, which is needed to create all others.

use eddyline_engine::EngineError;
use eddyline_protocol::Scope;
use eddyline_store::Namespace;

use super::settings::StartError;
use crate::api::{Api, keyring};

/// Ensures that `default` has an admin key: stores the configured key, or, if there are no keys at all, creates one and
/// prints it once.
pub(super) async fn ensure(api: &Api) -> Result<(), StartError> {
    let engine = api.engine();
    let failed = |error: EngineError| StartError::FirstKey(error);
    let now = engine.now().await.map_err(failed)?;
    if let Some(given) = &api.about().settings.admin_key {
        let record = keyring::given(given, now).map_err(StartError::Usage)?;
        // It may exist from an earlier start.
        engine.add_key(&record).await.map_err(failed)?;
        return Ok(());
    }
    let default = Namespace::default();
    if !engine.keys(&default).await.map_err(failed)?.is_empty() {
        return Ok(());
    }
    let (key, record) = keyring::make(engine, default, "admin".to_owned(), &[Scope::Admin], now, None);
    if engine.add_key(&record).await.map_err(failed)? {
        eprintln!("Admin key of `default` (not shown again): {key}");
    }
    Ok(())
}
