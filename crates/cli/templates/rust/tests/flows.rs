//! The flows on a real engine in this process, with a clock that jumps.

use eddyline::testing::TestEngine;
use serde_json::{Value, json};

#[tokio::test]
async fn a_guest_is_welcomed() {
    let t = TestEngine::shaking(greet::staff).await;
    t.apply(include_str!("../flows/greet.yaml")).await;
    let run = t.run("welcome", json!({"name": "Ada"})).await;
    assert_eq!(run.result::<String>().await.unwrap(), "Welcome, Ada. Hello Ada");
    assert_eq!(run.names().await, ["write", "pause", "greet"]);
    t.stop().await;
}

#[tokio::test]
async fn the_graph_flow_retries_the_dictionary() {
    let t = TestEngine::start(greet::staff).await;
    t.apply(include_str!("../flows/greet.yaml")).await;
    let run = t.run("greet", json!({"name": "Grace"})).await;
    assert_eq!(run.result::<Value>().await.unwrap(), json!({"greeting": "Hello Grace!"}));
    t.stop().await;
}
