//! W1 on DBOS: workflows of ten steps in a row, in the database that the first argument names. For each line with a number
//! of workflows in flight and of workflows in all it prints the seconds that they took.

use std::time::Instant;

use dbos::{Config, DBOS, step};
use serde_json::{Value, json};

type Failed = Box<dyn std::error::Error>;

async fn chain(_: Value) -> dbos::Result<Value> {
    for at in 0..10 {
        step(&format!("s{at}"), move || async move { dbos::Result::Ok(json!({"ok": true, "step": at})) }).await?;
    }
    Ok(json!({"ok": true}))
}

#[tokio::main]
async fn main() -> Result<(), Failed> {
    let url = std::env::args().nth(1).ok_or("usage: dbos-chain URL")?;
    let config = Config { app_version: Some("1".to_owned()), ..Config::new("dbos-chain", url) };
    let dbos = DBOS::new(config);
    let chain = dbos.register_workflow("chain", chain)?;
    dbos.launch().await?;
    println!("ready");
    loop {
        let mut line = String::new();
        if std::io::stdin().read_line(&mut line)? == 0 {
            break;
        }
        let mut numbers = line.split_whitespace().filter_map(|number| number.parse::<usize>().ok());
        let (Some(in_flight), Some(runs)) = (numbers.next(), numbers.next()) else { return Err("two numbers".into()) };
        let since = Instant::now();
        let lanes: Vec<tokio::task::JoinHandle<dbos::Result<()>>> = (0..in_flight)
            .map(|lane| {
                let chain = chain.clone();
                let share = runs / in_flight + usize::from(lane < runs % in_flight);
                tokio::spawn(async move {
                    for at in 0..share {
                        chain.run(json!({"order": at, "note": "a payload like those of every day"})).await?;
                    }
                    dbos::Result::Ok(())
                })
            })
            .collect();
        for lane in lanes {
            lane.await??;
        }
        println!("{}", since.elapsed().as_secs_f64());
    }
    dbos.shutdown().await;
    Ok(())
}
