//! The clock of a server for tests.

use eddyline_language::time::iso;
use eddyline_protocol::{MoveTestClock, TestClock};

use super::call::{ApiResult, Call, ok};
use super::failure::Failure;
use super::to_wire::millis;

/// `POST /v1/test/clock`
pub(crate) async fn set(mut call: Call) -> ApiResult {
    let asked: MoveTestClock = call.json_or_default().await?;
    let Some(clock) = call.api.about().test_clock.clone() else {
        return Err(Failure::not_found("route", "/v1/test/clock; start the server with --test-clock"));
    };
    if let Some(auto) = asked.auto {
        clock.set_auto(auto);
    }
    if let Some(by) = asked.advance {
        clock.advance(millis(by)).await;
    }
    ok(&TestClock { now: iso(clock.now()), auto: clock.is_auto() })
}
