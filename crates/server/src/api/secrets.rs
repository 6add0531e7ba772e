//! Hides gate tokens. Gate URLs are secrets that inputs and outputs carry to the steps that pass them on. A caller that
//! may not open gates sees the URL without the token.

const BEFORE: &str = "/hooks/";
/// The token of a gate in hex.
const TOKEN_CHARS: usize = 64;
const INSTEAD: &str = "…";

/// Replaces the tokens in gate URLs. Neither tokens nor the replacement need escaping in JSON, so the text can be
/// edited directly.
pub(super) fn left_out(json: String) -> String {
    let Some(mut at) = json.find(BEFORE) else { return json };
    let (mut shown, mut rest) = (String::with_capacity(json.len()), json.as_str());
    loop {
        let (before, after) = rest.split_at(at + BEFORE.len());
        shown.push_str(before);
        let token = after.bytes().take_while(u8::is_ascii_hexdigit).count();
        rest = if token >= TOKEN_CHARS {
            shown.push_str(INSTEAD);
            &after[token..]
        } else {
            after
        };
        match rest.find(BEFORE) {
            Some(next) => at = next,
            None => break,
        }
    }
    shown.push_str(rest);
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_left_out_wherever_they_are_and_nothing_else_is() {
        let token = "509d3760c9bd0f158dd04b81af440e2cff5e9a0bbdf61ae57817e7413ac1e14a";
        let check = |with: &str, without: &str| assert_eq!(left_out(with.replace("TOKEN", token)), without);
        check(
            r#"{"a":"http://x/hooks/TOKEN","b":["/hooks/TOKEN?x","/hooks/TOKEN"]}"#,
            r#"{"a":"http://x/hooks/…","b":["/hooks/…?x","/hooks/…"]}"#,
        );
        check(r#"{"/hooks/TOKEN":1}"#, r#"{"/hooks/…":1}"#);
        check(
            r#"["/hooks/t/order","/hooks/abc","/hooks//hooks/"]"#,
            r#"["/hooks/t/order","/hooks/abc","/hooks//hooks/"]"#,
        );
        check("[1]", "[1]");
    }
}
