//! How much memory a start allocates besides its input.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use eddyline_engine::StartRequest;
use rig::Rig;
use serde_json::json;

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

const INPUT_BYTES: usize = 1_900_000;

#[tokio::test]
async fn a_start_makes_no_copy_of_its_input_with_or_without_an_idempotency_key() {
    let rig = Rig::memory();
    rig.register("{name: f, steps: {a: {run: a}}}").await;
    for key in [None, Some("key".to_owned())] {
        let input = json!("x".repeat(INPUT_BYTES));
        let request = StartRequest { flow: "f".to_owned(), input, idempotency_key: key, ..StartRequest::default() };
        let profiler = dhat::Profiler::builder().testing().build();
        rig.engine.start_run(&rig.ns, request).await.unwrap();
        let allocated = dhat::HeapStats::get().total_bytes as usize;
        drop(profiler);
        assert!(allocated < INPUT_BYTES / 2, "{allocated} bytes were allocated");
    }
    rig.stop().await;
}
