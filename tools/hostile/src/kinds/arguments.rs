//! Invalid arguments and variables, alone and in combination.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use crate::case::{Case, Expect};
use crate::chance::Choices;
use crate::fixtures::Fixtures;

/// Values: numbers out of every range, and non-numbers. None requests much feasible work.
const VALUES: [&str; 44] = [
    "0",
    "1",
    "2",
    "3",
    "-1",
    "-2",
    "-0",
    "+1",
    "1.5",
    "-0.5",
    "nan",
    "NaN",
    "inf",
    "-inf",
    "1e9",
    "1e-45",
    "1e400",
    "0x10",
    "1_000",
    "٣",
    "",
    " ",
    "\n",
    "a\nerror: b",
    "\u{1b}[2J",
    "-",
    "--",
    "=",
    ",",
    "1,,2",
    "a,b",
    "on",
    "off",
    "all",
    "auto",
    "cuda:99",
    "turbo3",
    "q8_0",
    "sink:4",
    "boundary:1,2,3",
    "18446744073709551615",
    "18446744073709551616",
    "-9223372036854775809",
    "99999999999999999999999999999999",
];

/// Options with values, and without.
const VALUED: [&str; 44] = [
    "-m",
    "-p",
    "-f",
    "-c",
    "-n",
    "-t",
    "-s",
    "-b",
    "-ub",
    "-ngl",
    "-ctk",
    "-ctv",
    "--device",
    "--temp",
    "--top-k",
    "--top-p",
    "--min-p",
    "--repeat-penalty",
    "--repeat-last-n",
    "--kv-policy",
    "--kv-types",
    "--chat-template",
    "--system-prompt",
    "--prompt-cache",
    "--log-level",
    "--log-format",
    "--chunks",
    "--depths",
    "--dim",
    "--vectors",
    "--base",
    "--state",
    "--report",
    "-o",
    "-d",
    "-r",
    "--synthetic",
    "--form",
    "--kv-tail",
    "-fa",
    "--override-kv",
    "--hf-file",
    "--no-such",
    "-zz",
];
const PLAIN: [&str; 20] = [
    "--json",
    "--quiet",
    "-v",
    "--raw",
    "--no-special",
    "--ignore-eos",
    "--context-shift",
    "--tune",
    "--profile",
    "--offline",
    "-cnv",
    "-no-cnv",
    "--mlock",
    "--help",
    "--version",
    "--",
    "-",
    "-h",
    "-e",
    "--verbose",
];
const COMMANDS: [&[&str]; 14] = [
    &["run"],
    &["chat"],
    &["inspect"],
    &["doctor"],
    &["bench"],
    &["eval", "ppl"],
    &["eval", "kld"],
    &["eval", "niah"],
    &["eval", "distortion"],
    &["convert"],
    &["quantize"],
    &["completions"],
    &["man"],
    &["eval"],
];

/// Options of `run` and most other commands, with extreme values.
const MILD: [(&str, &[&str]); 18] = [
    ("-c", &["0", "1", "2", "31", "2147483647", "2147483648"]),
    ("-n", &["0", "1", "-1", "-2", "-3", "9223372036854775807"]),
    ("-t", &["1", "2", "16", "17", "1000"]),
    ("-s", &["-1", "0", "18446744073709551615"]),
    ("-b", &["0", "-1", "x"]),
    ("-ngl", &["0", "1", "all", "-1", "99"]),
    ("-dev", &["cpu,cpu", "cpu,cpu,cpu", "cuda:0,cuda:0", "cpu,auto", "cpu,"]),
    ("-ts", &["1", "1,1", "1e38,1e-38", "0,1", "nan,1", ","]),
    ("-ctk", &["turbo2", "q4_0", "bf16", "f32", "tq3_1s"]),
    ("-ctv", &["turbo4", "q8_0", "auto", "Q8_0"]),
    ("--temp", &["0", "-0", "1e-45", "3e38", "nan", "inf", "-1"]),
    ("--top-k", &["0", "1", "-1", "18446744073709551615"]),
    ("--top-p", &["0", "1", "1.1", "nan", "1e-45"]),
    ("--min-p", &["0", "1", "-1", "nan"]),
    ("--repeat-penalty", &["0", "1e-45", "3e38", "-1", "nan", "inf"]),
    ("--repeat-last-n", &["0", "-1", "18446744073709551615"]),
    (
        "--kv-policy",
        &["none", "sink:0", "sink:1000", "recent:1", "alpha:0", "alpha:nan", "boundary:9,9", "sink:1,sink:2"],
    ),
    ("-p", &["", " ", "-5+3=?", "<|im_end|>", "a\nb"]),
];

/// Returns options that bound a command's work, for arguments without errors.
fn bounds(command: &[&str]) -> &'static [&'static str] {
    match command {
        ["run"] => &["-p", "hi", "-n", "1", "-t", "1"],
        ["chat"] => &["-n", "1", "-t", "1"],
        ["bench"] => &["-p", "1", "-n", "1", "-r", "1", "-t", "1"],
        ["eval", "ppl" | "kld"] => &["--chunks", "1", "-c", "16", "-t", "1"],
        ["eval", "niah"] => &["-c", "64", "--depths", "1", "--needles", "1", "-t", "1"],
        ["eval", "distortion"] => &["--vectors", "1"],
        ["convert"] => &["folder", "out.gguf"],
        ["quantize"] => &["bundled", "out.gguf", "q4_0"],
        _ => &[],
    }
}

fn value(chance: &mut Choices) -> OsString {
    match chance.below(12) {
        0 => OsString::from_vec(
            [&b"\xff\xfe"[..], &chance.bytes(8)].concat().into_iter().filter(|&b| b != 0).collect(),
        ),
        1 => "9".repeat(1 + chance.below(3000)).into(),
        _ => chance.of(&VALUES).into(),
    }
}

/// Creates a command with a few options and words of any value.
pub fn arguments(chance: &mut Choices, _: &Fixtures, folder: &Path) -> io::Result<Case> {
    let command = chance.of(&COMMANDS);
    let mut case = Case::new(folder, command.iter().copied());
    let mut own = Vec::new();
    let is_mild = chance.one_in(2);
    for _ in 0..=chance.below(3) {
        if is_mild {
            let (option, values) = chance.of(&MILD);
            own.extend([option, chance.of(values)].map(OsString::from));
            continue;
        }
        let option = chance.of(&VALUED);
        match chance.below(6) {
            0 => own.push(chance.of(&PLAIN).into()),
            1 => own.push(value(chance)),
            2 => {
                let mut joined = OsString::from(option);
                joined.push("=");
                joined.push(value(chance));
                own.push(joined);
            }
            _ => own.extend([option.into(), value(chance)]),
        }
    }
    // A bound is omitted if its option is under test.
    let mut bounds = bounds(command);
    while let [name, of, rest @ ..] = bounds {
        let is_tried = |arg: &OsString| arg.as_encoded_bytes().starts_with(name.as_bytes());
        if !own.iter().any(is_tried) || !name.starts_with('-') {
            case = case.and([*name, *of]);
        }
        bounds = rest;
    }
    case = case.and(bounds).and(own);
    case.is_conversation = command == ["chat"];
    // A name among the values may be an output file.
    for name in case.args.clone() {
        let name = name.to_string_lossy().into_owned();
        let assigned = name.split_once('=').map_or(name.clone(), |(_, value)| value.to_owned());
        case = case.output(&name).output(&assigned);
    }
    Ok(case)
}

const VARIABLES: [&str; 22] = [
    "KVANT_MODEL",
    "KVANT_PROMPT",
    "KVANT_THREADS",
    "KVANT_DEVICE",
    "KVANT_N_GPU_LAYERS",
    "KVANT_CTX_SIZE",
    "KVANT_CACHE_TYPE_K",
    "KVANT_CACHE_TYPE_V",
    "KVANT_KV_POLICY",
    "KVANT_KV_TYPES",
    "KVANT_SEED",
    "KVANT_TEMP",
    "KVANT_TOP_K",
    "KVANT_TOP_P",
    "KVANT_MIN_P",
    "KVANT_PREDICT",
    "KVANT_ISA",
    "KVANT_TUNING",
    "KVANT_LOG_LEVEL",
    "KVANT_CONTEXT_SHIFT",
    "KVANT_REPEAT_PENALTY",
    "KVANT_LOG_FORMAT",
];
/// Variables of other programs, which must never stop the program.
const FOREIGN: [&str; 12] = [
    "HOME",
    "XDG_CACHE_HOME",
    "TERM",
    "LANG",
    "LC_ALL",
    "NO_COLOR",
    "CLICOLOR_FORCE",
    "COLUMNS",
    "TMPDIR",
    "HF_HOME",
    "TZ",
    "OLLAMA_MODELS",
];

/// Creates one or two variables of any value.
pub fn variables(chance: &mut Choices, _: &Fixtures, folder: &Path) -> io::Result<Case> {
    let is_foreign = chance.one_in(3);
    let names: &[&str] = if is_foreign { &FOREIGN } else { &VARIABLES };
    let mut case = match chance.below(4) {
        0 => Case::new(folder, ["doctor"]),
        1 => Case::new(folder, ["inspect", "bundled"]),
        _ => Case::new(folder, ["run", "-p", "hi", "-n", "1"]),
    };
    for _ in 0..=chance.below(2) {
        let value = value(chance);
        case.env.push(((chance.of(names)).into(), value));
    }
    Ok(if is_foreign { case.expect(Expect::Answered) } else { case })
}
