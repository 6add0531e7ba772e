//! The rows of a batch as columns, in the order of the parameters of `commit_v1`.

use tokio_postgres::types::Type;
use uuid::Uuid;

use super::database::Param;

macro_rules! columns {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $of:ty => $type:ident,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Default)]
        pub(super) struct $name {
            $(pub $field: Vec<$of>,)+
        }

        impl $name {
            pub fn params<'a>(&'a self, params: &mut Vec<Param<'a>>) {
                $(params.push((&self.$field, Type::$type));)+
            }
        }
    };
}

columns! {
    /// Transitions. Rows of the other tables refer to theirs by its position in here, counted from 1.
    Commits {
        run: Uuid => UUID_ARRAY,
        ns: String => TEXT_ARRAY,
        base: i64 => INT8_ARRAY,
        version: i64 => INT8_ARRAY,
        command: Uuid => UUID_ARRAY,
        flow: String => TEXT_ARRAY,
        status: &'static str => TEXT_ARRAY,
        external_id: Option<String> => TEXT_ARRAY,
        root: Option<Uuid> => UUID_ARRAY,
        retry_of: Option<Uuid> => UUID_ARRAY,
        paused: bool => BOOL_ARRAY,
        memo: i64 => INT8_ARRAY,
        begun: bool => BOOL_ARRAY,
        ended: bool => BOOL_ARRAY,
        crc: i32 => INT4_ARRAY,
        header: String => TEXT_ARRAY,
        count: i32 => INT4_ARRAY,
        records_crc: i32 => INT4_ARRAY,
        records: String => TEXT_ARRAY,
    }
}

columns! {
    TakenMessages {
        c: i32 => INT4_ARRAY,
        at: i32 => INT4_ARRAY,
        id: String => TEXT_ARRAY,
    }
}

columns! {
    TakenTimers {
        c: i32 => INT4_ARRAY,
        at: i32 => INT4_ARRAY,
        activation: i64 => INT8_ARRAY,
        kind: i32 => INT4_ARRAY,
        fence: i64 => INT8_ARRAY,
        due: i64 => INT8_ARRAY,
    }
}

columns! {
    TakenExpiries {
        c: i32 => INT4_ARRAY,
        at: i32 => INT4_ARRAY,
        fence: i64 => INT8_ARRAY,
        why: i32 => INT4_ARRAY,
    }
}

columns! {
    /// Activations, or values.
    Bodies {
        c: i32 => INT4_ARRAY,
        id: i64 => INT8_ARRAY,
        crc: i32 => INT4_ARRAY,
        body: String => TEXT_ARRAY,
    }
}

columns! {
    Tasks {
        c: i32 => INT4_ARRAY,
        fence: i64 => INT8_ARRAY,
        activation: i64 => INT8_ARRAY,
        queue: String => TEXT_ARRAY,
        class: i64 => INT8_ARRAY,
        key: String => TEXT_ARRAY,
        age_ms: i64 => INT8_ARRAY,
        limits: String => TEXT_ARRAY,
        handler: String => TEXT_ARRAY,
        is_run: bool => BOOL_ARRAY,
        start_ms: Option<i64> => INT8_ARRAY,
        timeout_ms: Option<i64> => INT8_ARRAY,
        closed: bool => BOOL_ARRAY,
        crc: i32 => INT4_ARRAY,
        body: String => TEXT_ARRAY,
        started_crc: i32 => INT4_ARRAY,
        started: String => TEXT_ARRAY,
        // The claims of the same call that may have it at once, by their group, from 1; and the build of their worker.
        group: i32 => INT4_ARRAY,
        build: Option<String> => TEXT_ARRAY,
    }
}

columns! {
    DroppedTasks {
        c: i32 => INT4_ARRAY,
        fence: i64 => INT8_ARRAY,
        remove: bool => BOOL_ARRAY,
    }
}

columns! {
    Timers {
        c: i32 => INT4_ARRAY,
        activation: i64 => INT8_ARRAY,
        kind: i32 => INT4_ARRAY,
        fence: i64 => INT8_ARRAY,
        set: bool => BOOL_ARRAY,
        after: Option<i64> => INT8_ARRAY,
        at: Option<i64> => INT8_ARRAY,
    }
}

columns! {
    Messages {
        c: i32 => INT4_ARRAY,
        target: Uuid => UUID_ARRAY,
        id: String => TEXT_ARRAY,
        crc: i32 => INT4_ARRAY,
        body: String => TEXT_ARRAY,
    }
}

columns! {
    Events {
        c: i32 => INT4_ARRAY,
        id: String => TEXT_ARRAY,
        name: String => TEXT_ARRAY,
        key: Option<String> => TEXT_ARRAY,
        crc: i32 => INT4_ARRAY,
        body: String => TEXT_ARRAY,
    }
}

columns! {
    /// Claims. Each is one of a group.
    Requests {
        group: i32 => INT4_ARRAY,
        request: Uuid => UUID_ARRAY,
        worker: String => TEXT_ARRAY,
        max: i32 => INT4_ARRAY,
        most: Option<i32> => INT4_ARRAY,
        lease_ms: i64 => INT8_ARRAY,
    }
}

columns! {
    /// What claims ask for. Claims with equal namespaces, queues and offers are one group.
    Groups {
        ns: String => TEXT_ARRAY,
        queues: String => TEXT_ARRAY,
        offer: String => TEXT_ARRAY,
    }
}

columns! {
    /// The ranks from which to look for tasks.
    Lows {
        group: i32 => INT4_ARRAY,
        queue: String => TEXT_ARRAY,
        class: i64 => INT8_ARRAY,
        low: i64 => INT8_ARRAY,
    }
}

impl Messages {
    /// Those of a commit of documents refer to no transition.
    pub fn params_alone<'a>(&'a self, params: &mut Vec<Param<'a>>) {
        let mut all = Vec::new();
        self.params(&mut all);
        params.extend(all.into_iter().skip(1));
    }
}

impl Events {
    pub fn params_alone<'a>(&'a self, params: &mut Vec<Param<'a>>) {
        let mut all = Vec::new();
        self.params(&mut all);
        params.extend(all.into_iter().skip(1));
    }
}
