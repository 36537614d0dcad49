//! Parses a line of a conversation: a message, or a command that begins with `/`.

use kvant::MediaKind;

/// A parsed line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// A message for the model.
    Message(String),
    /// `/help`
    Help,
    /// `/exit`
    Exit,
    /// `/clear`
    Clear,
    /// `/regenerate`
    Regenerate,
    /// `/system`, with the new message if one is given.
    System(Option<String>),
    /// `/stats`
    Stats,
    /// `/kv`
    Kv,
    /// `/save FILE`
    Save(String),
    /// `/load FILE`
    Load(String),
    /// `/image FILE` or `/audio FILE`: a medium for the next message.
    Media(MediaKind, String),
}

/// Text of `/help`.
pub const HELP: &str = "\
/clear          forget the conversation (also /reset)
/regenerate     another answer to the last message
/system TEXT    another system message; without TEXT, show it
/stats          speed of the last answer
/kv             what the cache holds and takes
/save FILE      keep the conversation's cache in a file
/load FILE      go on with a saved conversation
/image FILE     add an image to the next message
/audio FILE     add an audio clip to the next message
/exit           leave (also /bye, /quit, Ctrl-D); Ctrl-C stops an answer
//TEXT          a message that begins with /
A line that ends in \\ goes on in the next; \"\"\" begins and ends a message of several lines.";

/// Commands of other chat programs, and their counterparts here.
const OTHERS: [(&str, &str); 5] = [
    ("set", "/system TEXT sets the system message, and options follow kvant chat (see kvant chat --help)"),
    ("show", "/stats, /kv and /system show the conversation's state, kvant inspect shows a model"),
    ("read", "kvant run -f FILE reads a file, and a text between \"\"\" may have many lines"),
    ("glob", "kvant run -f FILE reads a file, and a text between \"\"\" may have many lines"),
    ("model", "kvant chat MODEL starts a chat with another model"),
];

/// Parses a message or command that is not empty.
///
/// # Errors
///
/// One line for the user: an unknown command, or a command without its file.
pub fn parse(line: &str) -> Result<Input, String> {
    let Some(rest) = line.strip_prefix('/') else { return Ok(Input::Message(line.to_owned())) };
    if rest.starts_with('/') {
        return Ok(Input::Message(rest.to_owned()));
    }
    let (name, argument) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let argument = Some(argument.trim()).filter(|argument| !argument.is_empty()).map(str::to_owned);
    let file = || argument.clone().ok_or_else(|| format!("/{name} needs a file name"));
    match name {
        "help" | "?" => Ok(Input::Help),
        "exit" | "bye" | "quit" => Ok(Input::Exit),
        "clear" | "reset" => Ok(Input::Clear),
        "regenerate" | "regen" => Ok(Input::Regenerate),
        "system" => Ok(Input::System(argument)),
        "stats" => Ok(Input::Stats),
        "kv" => Ok(Input::Kv),
        "save" => file().map(Input::Save),
        "load" => file().map(Input::Load),
        "image" => file().map(|file| Input::Media(MediaKind::Image, file)),
        "audio" => file().map(|file| Input::Media(MediaKind::Audio, file)),
        _ => {
            let instead = OTHERS.iter().find(|(other, _)| *other == name).map(|(_, instead)| *instead);
            let instead = instead.unwrap_or("/help lists them, // begins a message with /");
            Err(format!("no command /{name}; {instead}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_with_one_leading_slash_are_commands() {
        let message = |text: &str| Ok(Input::Message(text.to_owned()));
        assert_eq!(parse("hello"), message("hello"));
        assert_eq!(parse("//etc/hosts"), message("/etc/hosts"));
        assert_eq!(parse("1 / 2"), message("1 / 2"));
        for leave in ["/exit", "/bye", "/quit"] {
            assert_eq!(parse(leave), Ok(Input::Exit));
        }
        assert_eq!(parse("/system"), Ok(Input::System(None)));
        assert_eq!(parse("/system  Be brief. "), Ok(Input::System(Some("Be brief.".to_owned()))));
        assert_eq!(parse("/save a b"), Ok(Input::Save("a b".to_owned())));
        assert!(parse("/load").unwrap_err().contains("file name"));
        assert!(parse("/etc/hosts").unwrap_err().contains("//"));
        assert!(parse("/set system x").unwrap_err().contains("/system TEXT"));
    }

    #[test]
    fn chat_help_lists_exactly_the_commands() {
        for line in HELP.lines().filter(|line| line.starts_with('/') && !line.starts_with("//")) {
            let usage = line.split("  ").next().unwrap_or_default();
            assert!(parse(usage).is_ok(), "{usage}");
        }
        for name in ["clear", "regenerate", "system", "stats", "kv", "save", "load", "image", "audio", "exit"]
        {
            assert!(HELP.contains(&format!("/{name}")), "{name}");
        }
    }
}
