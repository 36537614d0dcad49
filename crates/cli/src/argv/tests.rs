//! Tests of command lines as llama.cpp and ollama users type them.

use clap::CommandFactory;

use super::*;
use crate::commands::Cli;

fn read_line(line: &[&str]) -> Result<Argv, String> {
    let mut root = Cli::command();
    root.build();
    let args = ["kvant"].iter().chain(line).map(OsString::from);
    read(&root, args).map_err(|failure| match failure {
        Failure::Usage(line) => line,
        other => panic!("{other:?}"),
    })
}

fn args(line: &[&str]) -> Vec<String> {
    let argv = read_line(line).unwrap();
    argv.args.into_iter().skip(1).map(|arg| arg.into_string().unwrap()).collect()
}

#[test]
fn foreign_options_become_clap_options() {
    for (typed, want) in [
        (
            &["run", "-ngl", "99", "-ctk", "q8_0"][..],
            &["run", "--n-gpu-layers", "99", "--cache-type-k", "q8_0"][..],
        ),
        (
            &["run", "-dev", "cuda:0,cpu", "-ts", "3,1"],
            &["run", "--device", "cuda:0,cpu", "--tensor-split", "3,1"],
        ),
        (&["run", "-ctk=q8_0"], &["run", "--cache-type-k=q8_0"]),
        (&["run", "--top_k", "5", "--top_p=0.5"], &["run", "--top-k", "5", "--top-p=0.5"]),
        (&["run", "--temp", "-1", "-s", "-1"], &["run", "--temp=-1", "-s=-1"]),
        (&["run", "-p", "-5+3=?"], &["run", "-p=-5+3=?"]),
        (&["run", "-p", "--", "-n", "3"], &["run", "-p=--", "-n", "3"]),
        (&["run", "-p", "-n", "3"], &["run", "-p", "-n", "3"]),
        (&["run", "-f", "-"], &["run", "-f", "-"]),
        (&["run", "-5+3=?"], &["run", "--", "-5+3=?"]),
        (&["run", "- what is a dash?", "-n", "3"], &["run", "-n", "3", "--", "- what is a dash?"]),
        (&["run", "--", "-n"], &["run", "--", "-n"]),
        (&["run", "-n4", "-n-1", "-c4096"], &["run", "-n4", "-n-1", "-c4096"]),
        (&["run", "-sys", "Be brief.", "hi"], &["run", "--system-prompt", "Be brief.", "hi"]),
        (&["run", "-no-cnv", "hi"], &["run", "--raw", "hi"]),
        (&["run", "-fa", "hi"], &["run", "hi"]),
        (&["run", "-fa", "on", "hi"], &["run", "hi"]),
        (&["bench", "-fa", "0,1", "-mmp", "0", "-n", "1"], &["bench", "-n", "1"]),
        (&["eval", "ppl", "-ub", "64"], &["eval", "ppl", "--ubatch-size", "64"]),
        (&["run", "-ub", "64"], &["run"]),
        (&["inspect", "-v"], &["inspect", "-v"]),
        (&["run", "-v"], &["run", "--log-level=debug"]),
        (&["help", "run"], &["help", "run"]),
        (&["chat", "-cnv", "-mli", "-i"], &["chat"]),
    ] {
        assert_eq!(args(typed), want, "{typed:?}");
    }
}

#[test]
fn unsupported_options_are_rejected_with_an_alternative() {
    for (typed, words) in [
        (&["-m", "a.gguf", "-p", "x"][..], &["a command comes before -m", "kvant run -m"][..]),
        (&["-hf", "x/y"], &["a command comes before -hf"]),
        (&["model.gguf"], &["kvant run model.gguf"]),
        (&["why is the sky blue?"], &["kvant run \"why is the sky blue?\""]),
        (&["fly"], &["no command 'fly'", "kvant --help"]),
        (&["rum"], &["did you mean kvant run?"]),
        (&["pull", "x"], &["kvant run -hf"]),
        (&["server"], &["kvant serve"]),
        (&["llama-cli", "-m", "x"], &["kvant run answers a prompt"]),
        (&["run", "-np", "4"], &["-np: kvant serve"]),
        (&["eval", "pp"], &["no command 'pp'", "did you mean ppl?"]),
        (&["run", "--tempp", "1"], &["no option --tempp", "did you mean --temp?", "kvant run --help"]),
        (&["run", "-temp", "1"], &["no option -temp", "did you mean --temp?"]),
        (&["run", "--n-predct", "1"], &["did you mean --n-predict?"]),
        (&["run", "-x"], &["no option -x in kvant run"]),
        (&["inspect", "--temp", "1"], &["no option --temp in kvant inspect"]),
        (&["run", "-cnv"], &["-cnv: ", "kvant chat"]),
        (&["chat", "-no-cnv"], &["-no-cnv: ", "kvant run --raw"]),
        (&["run", "--lora-init-without-apply"], &["--lora-init-without-apply: ", "FILE:0"]),
        (&["run", "--json_schema", "{}"], &["--json_schema: ", "grammar"]),
    ] {
        let line = read_line(typed).unwrap_err();
        assert!(!line.contains('\n'), "{line}");
        for word in words {
            assert!(line.contains(word), "{typed:?}: '{word}' is not in: {line}");
        }
    }
}

#[test]
fn default_behaviour_gets_no_note() {
    for (typed, n_notes) in [
        (&["run", "-fa", "on"][..], 0),
        (&["run", "-fa"], 0),
        (&["run", "-fa", "off"], 1),
        (&["run", "--flash-attn=0"], 1),
        (&["run", "--mlock", "--no-mmap", "-b", "64"], 3),
        (&["run", "--jinja", "--no-warmup", "--color"], 0),
    ] {
        assert_eq!(read_line(typed).unwrap().notes.len(), n_notes, "{typed:?}");
    }
}

/// Checks that every name of the table has its stated effect in some command, or is an option
/// there.
#[test]
fn every_foreign_option_is_accepted_or_rejected_in_one_line() {
    let commands: [&[&str]; 8] = [
        &["run"],
        &["chat"],
        &["serve"],
        &["bench"],
        &["inspect"],
        &["quantize"],
        &["eval", "ppl"],
        &["eval", "niah"],
    ];
    for name in foreign_flags::names() {
        let outcomes = commands.map(|command| (command, read_line(&[command, &[name, "1"]].concat())));
        let has_effect = |meaning| {
            outcomes.iter().any(|(command, outcome)| match (meaning, outcome) {
                (Meaning::Is(ours), Ok(argv)) => argv.args.iter().any(|arg| arg.to_str() == Some(ours)),
                (Meaning::Nothing { takes, why }, Ok(argv)) => {
                    let n_left = usize::from(takes == Arity::Nothing);
                    let expects_note = takes != Arity::Switch && !why.is_empty();
                    argv.args.len() == 1 + command.len() + n_left && argv.notes.is_empty() != expects_note
                }
                (Meaning::Only(_, why) | Meaning::No(why), Err(line)) => *line == format!("{name}: {why}"),
                _ => false,
            })
        };
        let is_own_option = |(_, outcome): &(_, Result<Argv, _>)| {
            outcome.as_ref().is_ok_and(|argv| argv.args.iter().any(|arg| arg.to_str() == Some(name)))
        };
        assert!(foreign_flags::of(name).any(has_effect) || outcomes.iter().any(is_own_option), "{name}");
    }
}
