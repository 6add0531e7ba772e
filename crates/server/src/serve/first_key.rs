//! The first key: without one nobody could make another.

use eddyline_engine::EngineError;
use eddyline_protocol::Scope;
use eddyline_store::Namespace;

use super::settings::StartError;
use crate::api::{Api, keyring};

/// Sees to it that there is an admin key of `default`: the one that was given, or, where there is no key at all, a new one
/// that is said once.
pub(super) async fn ensure(api: &Api) -> Result<(), StartError> {
    let engine = api.engine();
    let failed = |error: EngineError| StartError::FirstKey(error);
    let now = engine.now().await.map_err(failed)?;
    if let Some(given) = &api.about().settings.admin_key {
        let record = keyring::given(given, now).map_err(StartError::Usage)?;
        // It may be there from an earlier start.
        engine.add_key(&record).await.map_err(failed)?;
        return Ok(());
    }
    let default = Namespace::default();
    if !engine.keys(&default).await.map_err(failed)?.is_empty() {
        return Ok(());
    }
    let (key, record) = keyring::make(engine, default, "admin".to_owned(), &[Scope::Admin], now, None);
    if engine.add_key(&record).await.map_err(failed)? {
        eprintln!("The admin key of `default`, which is not shown again: {key}");
    }
    Ok(())
}
