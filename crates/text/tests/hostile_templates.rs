//! Hostile templates. Each is rejected, stopped, or renders within bounded time, memory and stack,
//! and the process continues. Runs in a process of its own, so that its memory can be measured.

use std::time::{Duration, Instant};

use kvant_text::chat::{ChatTemplate, Message, RenderOptions, Rendered, TemplateError};

/// Stack bytes that suffice for parsing and rendering any template.
const STACK: usize = 1 << 20;
/// Memory of the whole process at the end, in kilobytes.
const MAX_MEMORY_KB: u64 = 256 << 10;
/// Tells a template without end from a bounded one. Optimised, the slowest takes half a second; a
/// build for tests on a busy machine has taken 12 s.
const MAX_TIME: Duration = Duration::from_secs(120);

fn render(source: &str) -> Result<Rendered, TemplateError> {
    let messages =
        [Message::user("Hi \u{1F680} there"), Message::assistant("a".repeat(1000)), Message::user("")];
    ChatTemplate::new(source, "<s>", "</s>")?.render(&messages, &RenderOptions::default())
}

/// Wraps `body` in a loop of 10^12 iterations.
fn forever(body: &str) -> String {
    let outer = "{% for i in range(1000000) %}{% for j in range(1000000) %}";
    format!("{outer}{body}{{% endfor %}}{{% endfor %}}")
}

/// Builds a variable that grows by `step` for many iterations.
fn grows(first: &str, step: &str) -> String {
    format!(
        "{{% set ns = namespace(x={first}) %}}{{% for i in range(200) %}}{{% set ns.x = {step} %}}{{% endfor %}}\
         {{{{ ns.x|length }}}}"
    )
}

fn corpus() -> Vec<(&'static str, String)> {
    let nested =
        |open: &str, close: &str, n: usize| format!("{{{{ {}{} }}}}", open.repeat(n), close.repeat(n));
    let n = 100_000;
    vec![
        // Stack of the parser.
        ("lists in lists", nested("[", "]", n)),
        ("lists that never end", format!("{{{{ {}", "[".repeat(n))),
        ("brackets", nested("(", ")", n)),
        ("mappings", format!("{{{{ {}1{} }}}}", "{'a':".repeat(n / 4), "}".repeat(n / 4))),
        ("not", format!("{{{{ {}x }}}}", "not ".repeat(n / 2))),
        ("minus", format!("{{{{ {}1 }}}}", "-".repeat(n))),
        ("plus", format!("{{{{ 1{} }}}}", "+1".repeat(n))),
        ("tilde", format!("{{{{ 1{} }}}}", "~1".repeat(n))),
        ("power", format!("{{{{ 1{} }}}}", "**1".repeat(n / 2))),
        ("or", format!("{{{{ 0{} }}}}", " or 0".repeat(n / 4))),
        ("comparisons", format!("{{{{ 1{} }}}}", "<2<3".repeat(n / 4))),
        ("filters", format!("{{{{ 'a'{} }}}}", "|upper".repeat(n / 4))),
        ("tests", format!("{{{{ 1{} }}}}", " is defined".repeat(n / 8))),
        ("attributes", format!("{{{{ messages{} }}}}", ".a".repeat(n))),
        ("items", format!("{{{{ messages{} }}}}", "[0]".repeat(n / 2))),
        ("items in items", format!("{{{{ {}0{} }}}}", "messages[".repeat(n / 16), "]".repeat(n / 16))),
        ("calls", format!("{{{{ range{} }}}}", "(1)".repeat(n / 2))),
        ("calls in calls", format!("{{{{ {}1{} }}}}", "range(".repeat(n / 8), ")".repeat(n / 8))),
        ("else", format!("{{{{ {}1 }}}}", "1 if 0 else ".repeat(n / 8))),
        ("if", format!("{}{}", "{% if true %}".repeat(n / 16), "{% endif %}".repeat(n / 16))),
        ("elif", format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(n / 8))),
        ("for", format!("{}{}", "{% for i in 'a' %}".repeat(n / 32), "{% endfor %}".repeat(n / 32))),
        ("macros", format!("{}{}", "{% macro f() %}".repeat(n / 32), "{% endmacro %}".repeat(n / 32))),
        ("filters of tests", format!("{{{{ 1{} }}}}", "|map('upper')|select('in',[1])".repeat(n / 32))),
        ("a long string", format!("{{{{ '{}' }}}}", "x".repeat(n))),
        ("too long", " ".repeat(300 << 10)),
        // Stack of the renderer.
        ("a macro of itself", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_owned()),
        (
            "two macros",
            "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}".into(),
        ),
        ("a macro's default", "{% macro f(x=f()) %}{% endmacro %}{{ f() }}".to_owned()),
        (
            "a caller",
            "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}".to_owned(),
        ),
        ("values in values", grows("[]", "[ns.x]").replace("200", "100000")),
        ("mappings in mappings", grows("{}", "{'a': ns.x}").replace("200", "100000")),
        (
            "namespaces in themselves",
            "{% set a = namespace() %}{% set a.a = a %}{{ a }}{{ a.a.a.a == a }}".to_owned(),
        ),
        (
            "macros in macros",
            forever("{% macro f() %}{{ ns.f }}{% endmacro %}{% set ns.f = f %}{% set g = ns.f %}").replacen(
                "{%",
                "{% set ns = namespace(f=1) %}{%",
                1,
            ),
        ),
        // Time.
        ("a loop", forever("")),
        ("a loop of a loop's list", forever("{{ loop }}")),
        ("sums", forever("{{ range(1000)|sum }}")),
        ("sorts", forever("{{ range(10000)|sort(reverse=true)|first }}")),
        ("searches", forever("{{ 'b' in messages[1].content }}")),
        ("unique", "{{ range(100000)|unique|length }}".to_owned()),
        (
            "a mapping of many",
            "{% set ns = namespace(x={}) %}{% for i in range(100000) %}\
            {% set ns.x = dict(ns.x, a=i) %}{% endfor %}"
                .to_owned(),
        ),
        (
            "equal trees",
            grows("[1]", "[ns.x, ns.x]").replace("200", "100").replace("ns.x|length", "ns.x == ns.x"),
        ),
        (
            "ordered trees",
            grows("[1]", "[ns.x, ns.x]").replace("200", "100").replace("ns.x|length", "ns.x < ns.x"),
        ),
        ("strip", format!("{{% set x = ' ' * 60000000 %}}{}", forever("{{ x.strip() }}"))),
        // Memory.
        ("doubled text", grows("'xx'", "ns.x ~ ns.x")),
        ("added text", grows("'xx'", "ns.x + ns.x")),
        ("multiplied text", "{{ 'x' * 10000000000 }}".to_owned()),
        ("nothing, multiplied", "{{ '' * 1000000000000000000 }}{{ [] * 1000000000000000000 }}".to_owned()),
        ("multiplied lists", "{{ [1] * 10000000000 }}".to_owned()),
        ("doubled lists", grows("[1]", "ns.x + ns.x")),
        ("replaced text", grows("'xx'", "ns.x|replace('x', 'xx')")),
        ("replaced nothing", grows("'xx'", "ns.x.replace('', 'xx')")),
        ("joined text", grows("'xx'", "ns.x|join(ns.x)")),
        ("joined by method", grows("'xx'", "ns.x.join([ns.x, ns.x, ns.x])")),
        ("indented text", "{{ 'a\\nb'|indent(10000000000) }}".to_owned()),
        ("indented by text", grows("'\\nx'", "ns.x|indent(ns.x)")),
        ("indented JSON", "{{ [[1]]|tojson(indent=10000000000) }}".to_owned()),
        ("JSON of trees", grows("[1]", "[ns.x, ns.x]").replace("200", "100").replace("length", "tojson")),
        ("printed trees", grows("[1]", "[ns.x, ns.x]").replace("200", "100").replace("length", "string")),
        ("separators", grows("'xx'", "[1, 2, 3]|tojson(separators=[ns.x, ns.x])")),
        ("escaped text", grows("'&&'", "ns.x|escape")),
        ("a range", "{{ range(10000000000)|length }}".to_owned()),
        ("a range of big steps", "{{ range(0, 9223372036854775807, 9223372036854775807)|list }}".to_owned()),
        ("characters", "{{ ('x' * 60000000)|list|length }}".to_owned()),
        ("pieces", "{{ ('x ' * 30000000).split()|length }}".to_owned()),
        ("capitals", grows("'ΐΐ'", "ns.x|upper ~ ns.x")),
        ("output", forever("{{ messages }}")),
        ("a captured output", format!("{{% set x %}}{}{{% endset %}}", forever("xxxxxxxxxxxxxxxx"))),
        (
            "kept lists",
            "{% set ns = namespace(x=0) %}{% for i in range(100000) %}{% set ns.x = [range(100), ns.x] %}\
            {% endfor %}"
                .to_owned(),
        ),
        ("copied text", format!("{{% set x = 'x' * 30000000 %}}{}", forever("{% set y = x ~ 'y' %}"))),
        ("appended", format!("{{% set l = [] %}}{}", forever("{% set _ = l.append(l) %}"))),
        ("appended and kept", format!("{{% set l = [] %}}{}", forever("{% set _ = l.append(1) %}"))),
        (
            "popped",
            "{% set l = range(500000)|list %}{% for i in range(500000) %}{% set _ = l.pop(0) %}{% endfor %}"
                .into(),
        ),
        ("namespaces", forever("{% set a = namespace(x='y' * 1000) %}")),
        // Numbers, and malformed templates.
        ("big numbers", "{{ 9223372036854775807 * 9223372036854775807 * 9223372036854775807 }}".to_owned()),
        ("huge numbers", "{{ 99999999999999999999999999999999999999999999 }}".to_owned()),
        ("powers", "{{ 2 ** 100000 }}{{ 2.0 ** 100000 }}".to_owned()),
        ("division", "{{ 1 // 0 }}".to_owned()),
        ("the least number", "{{ -((-2) ** 127) }}{{ ((-2) ** 127) // -1 }}".to_owned()),
        (
            "slices",
            "{{ 'abc'[::-9223372036854775807] }}{{ 'abc'[9223372036854775807:-9223372036854775807] }}"
                .to_owned(),
        ),
        ("the least slice", "{{ [1][::-9223372036854775807 - 1] }}".to_owned()),
        ("not numbers", "{{ ['nan'|float, 1.0, 'nan'|float, 2.0, 'x'|float]|sort }}".to_owned()),
        ("rounded", "{{ 1.5|round(1000000000000) }}{{ 1e300|round(-400) }}{{ 1e300|int }}".to_owned()),
        ("times", "{{ strftime_now('%1000000000d') }}".to_owned()),
        ("wide times", "{{ strftime_now('%255d' * 5000000) }}".to_owned()),
        ("long times", forever("{{ strftime_now('%Y' * 10000) }}")),
        ("wide fields", forever("{{ '%4096d' * 1000 % ((1,) * 1000) }}")),
        ("wide numbers", forever("{{ '%.4096f' % 1e300 }}")),
        ("a centred text", "{{ 'a'.center(1048576) * 1000 }}".to_owned()),
        ("centred texts", forever("{% set a = 'a'.center(1048576) %}")),
        ("formats", forever("{{ ('{}' * 100000).format() if false else '{0}' * 1000 }}")),
        ("partitions", forever("{% set a = ('a' * 100000).partition('b') %}")),
        ("words", forever("{% set a = 'a ' * 100000 %}{{ a|wordcount }}{{ a|truncate(99999) }}")),
        ("batches", "{{ range(1000000)|batch(1)|list|length }}".to_owned()),
        ("slices of few", "{{ []|slice(1000000000000) }}".to_owned()),
        ("groups", "{{ range(1000000)|groupby('a')|length }}{{ 'ab' * 1000000|groupby(0) }}".to_owned()),
        ("a loop in itself", "{% for i in [1] recursive %}{{ loop([i]) }}{% endfor %}".to_owned()),
        (
            "loops that fan out",
            "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}".to_owned(),
        ),
        (
            "kept loops",
            "{% set l = [] %}{% for i in range(1000000) recursive %}{% set _ = l.append(loop) %}{% endfor %}"
                .to_owned(),
        ),
        ("a tag that does not end", "{% if".to_owned()),
        ("an escape", "{{ '\\".to_owned()),
        ("half a character", "{{ '\\ud800' }}{{ '\\xé' }}".to_owned()),
        ("a refusal of megabytes", "{{ raise_exception('x ' * 10000000) }}".to_owned()),
        ("an unknown of megabytes", "{{ strftime_now('%!' ~ 'x' * 10000000) }}".to_owned()),
    ]
}

/// Returns the peak memory of this process in kilobytes, if the system reports it.
fn peak_kb() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok())
}

#[test]
fn hostile_templates_are_bounded_in_time_memory_and_stack() {
    let corpus = corpus();
    assert!(corpus.len() >= 80, "{}", corpus.len());
    for (name, source) in corpus {
        let start = Instant::now();
        let run = std::thread::Builder::new().stack_size(STACK).spawn(move || match render(&source) {
            Ok(rendered) => format!("{} bytes", rendered.as_str().len()),
            Err(error) => {
                let line = error.to_string();
                assert!(line.lines().count() == 1 && line.len() < 2000, "{line}");
                line
            }
        });
        let summary = run.unwrap().join().unwrap_or_else(|_| panic!("'{name}' panicked"));
        let (time, kb) = (start.elapsed(), peak_kb().unwrap_or(0));
        println!("{name}: {summary} ({} ms, peak {} MB)", time.as_millis(), kb >> 10);
        assert!(time < MAX_TIME, "'{name}' took {time:?}");
        assert!(kb < MAX_MEMORY_KB, "'{name}' took {kb} kB");
    }
}
