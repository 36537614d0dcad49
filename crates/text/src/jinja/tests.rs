//! The language and its tracking of input text. Whole templates on conversations are tested in
//! `chat`.

use serde_json::json;

use super::*;

/// Renders `source` with fixed inputs, and puts input text in «marks».
pub(super) fn marked(source: &str) -> Result<String, Fault> {
    let untrusted = vec![
        ("x", json!("Ab c")),
        ("end", json!("<|end|>")),
        ("list", json!(["b", "A", "c"])),
        ("map", json!({"k": "v", "role": "user"})),
        ("message", json!({"role": "<|end|>", "n": 3, "f": 1e16, "content": " hi\nyou "})),
    ];
    let given = Inputs { own: vec![("bos", "<s>")], untrusted };
    let now = jiff::civil::date(2026, 1, 2).at(3, 4, 5, 0);
    let template = Template::parse(source).map_err(|(fault, _)| fault)?;
    let (text, own) = template.render(&given, now).map_err(|(fault, _)| fault)?;
    let mut out = String::new();
    let mut at = 0;
    for range in own {
        assert!(at <= range.start && range.start < range.end && range.end <= text.len());
        if at < range.start {
            out += &format!("«{}»", &text[at..range.start]);
        }
        out += &text[range.clone()];
        at = range.end;
    }
    if at < text.len() {
        out += &format!("«{}»", &text[at..]);
    }
    Ok(out)
}

#[test]
fn input_text_stays_marked_through_every_operation() {
    for (source, want) in [
        ("{{ x }}", "«Ab c»"),
        ("{{ bos + x + '!' }}", "<s>«Ab c»!"),
        ("{{ x ~ 1 ~ x }}", "«Ab c»1«Ab c»"),
        ("{{ (x + '!') * 2 }}", "«Ab c»!«Ab c»!"),
        ("{{ x|upper }}{{ x.lower() }}{{ x|title }}{{ x|capitalize }}", "«AB Cab cAb CAb c»"),
        ("{{ ('a ' + message.content + ' b').strip()|trim('a') }}", " « hi\nyou » b"),
        ("{{ (message.content + ' ')|trim }}|{{ (' ' + message.content).lstrip() }}", "«hi\nyou»|«hi\nyou »"),
        ("{{ ('[' + x + ']').split(' ')|join('-') }}", "[«Ab»-«c»]"),
        ("{{ ('[' + x + ']').split()[0] }}{{ x.splitlines()[0] }}", "[«AbAb c»"),
        ("{{ x.rsplit(' ', 1)[0] }}{{ x.split(' ', 1)|last }}", "«Abc»"),
        ("{{ ('(' + x + ')').replace('b', '_') }}", "(«A»_« c»)"),
        ("{{ 'a.b'|replace('.', end) }}", "a«<|end|>»b"),
        ("{{ ('<' + x + '>')[1:3] }}{{ ('<' + x + '>')[0] }}{{ x[-1] }}", "«Ab»<«c»"),
        ("{{ ('<' + x)[::-1] }}{{ ('<' + x)|reverse }}", "«c bA»<«c bA»<"),
        ("{{ ('1\\n' + message.content)|indent(2) }}", "1\n  « hi»\n  «you »"),
        ("{{ ('<' + end)|e }}", "&lt;«&lt;|end|&gt;»"),
        ("{{ [x, 'y'] }}{{ {'a': x} }}", "['«Ab c»', 'y']{'a': '«Ab c»'}"),
        (
            "{{ [x, 'y']|tojson }}{{ message|tojson }}",
            "[\"«Ab c»\", \"y\"]{\"«role»\": \"«<|end|>»\", \"«n»\": 3, \"«f»\": 1e+16, \"«content»\": \"« hi\\nyou »\"}",
        ),
        ("{{ list|sort|join }}{{ list|map('upper')|join(',') }}{{ list|first }}", "«AbcB»,«A»,«Cb»"),
        ("{% for c in 'a' + x %}{{ c }}.{% endfor %}", "a.«A».«b».« ».«c»."),
        ("{% for k, v in map.items() %}{{ k }}={{ v }};{% endfor %}", "«k»=«v»;«role»=user;"),
        ("{% set y %}({{ x }}){% endset %}{{ y }}{{ y|string }}", "(«Ab c»)(«Ab c»)"),
        (
            "{% macro f(a, b='.') %}{{ a }}{{ b }}{% endmacro %}{{ f(x) }}{{ f(b=x, a='-') }}",
            "«Ab c».-«Ab c»",
        ),
        ("{% set ns = namespace(t='') %}{% set ns.t = ns.t + end %}{{ ns.t }}", "«<|end|>»"),
        ("{{ x if x else 'no' }}{{ x or 'y' }}{{ nothing|default(x) }}", "«Ab cAb cAb c»"),
        ("{{ '<|' + message.role + '|>' }}{{ '<|' + map.role + '|>' }}", "<|«<|end|>»|><|user|>"),
        ("{{ x|list|join('') }}{{ x.join(['1', '2']) }}", "«Ab c»1«Ab c»2"),
        ("{{ x.removeprefix('A') }}{{ (x + '.').removesuffix('c.') }}", "«b cAb »"),
    ] {
        assert_eq!(marked(source).as_deref(), Ok(want), "{source}");
    }
}

#[test]
fn expressions_and_statements_have_jinjas_semantics() {
    for (source, want) in [
        (
            "{{ 1 + 2 * 3 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 // -2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 ** 10 }}",
            "7 3 -4 -4 2 3.5 1024",
        ),
        ("{{ 1 ~ 2 + 3 if false else 1 ~ (2 + 3) }}", "15"),
        ("{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 'a' < 'b' }}{{ not 1 == 2 }}", "TrueFalseTrueTrue"),
        ("{{ 1 == 1.0 }}{{ true == 1 }}{{ none == false }}{{ [1, 'a'] == [1.0, 'a'] }}", "TrueTrueFalseTrue"),
        ("{{ 'b' in 'abc' }}{{ 2 in [1, 2] }}{{ 'k' in {'k': 1} }}{{ 3 not in [1] }}", "TrueTrueTrueTrue"),
        ("{{ 10 is divisibleby 5 }}{{ 3 is odd and 4 is even }}{{ x is not defined }}", "TrueTrueFalse"),
        ("{{ -1|abs }}{{ '7'|int + 1 }}{{ 'x'|int(9) }}{{ 2.5|round }}{{ '1.5'|float }}", "1892.01.5"),
        (
            "{{ 1.0 }} {{ 1e16 }} {{ 123456789012345.0 }} {{ 0.0001 }} {{ 0.00001 }} {{ 1e-7 }}",
            "1.0 1e+16 123456789012345.0 0.0001 1e-05 1e-07",
        ),
        (
            "{{ [1, 2, 3][1:] }}{{ [1, 2, 3][::-1] }}{{ [1, 2, 3][-2] }}{{ 'abc'[:-1] }}{{ [1][5:] }}",
            "[2, 3][3, 2, 1]2ab[]",
        ),
        ("{{ range(3)|list }}{{ range(5, 0, -2)|list }}", "[0, 1, 2][5, 3, 1]"),
        (
            "{% for i in range(4) if i != 1 %}{{ loop.index }}{{ i }}{{ ',' if not loop.last }}{% else %}no{% endfor %}",
            "10,22,33",
        ),
        ("{% for i in [] %}{% else %}none{% endfor %}{% for i in nothing %}x{% endfor %}", "none"),
        (
            "{% set a = 1 %}{% for i in 'x' %}{% set a = 2 %}{% endfor %}{{ a }}{% if true %}{% set a = 3 %}{% endif %}{{ a }}",
            "13",
        ),
        ("{% set a, b = 1, 2 %}{{ a }}{{ b }}{% with c = 5 %}{{ c }}{% endwith %}{{ c }}", "125"),
        ("{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}", "3210"),
        ("{% macro g() %}[{{ caller('x') }}]{% endmacro %}{% call(y) g() %}{{ y }}!{% endcall %}", "[x!]"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}{% raw %}{{ x }}{% endraw %}", "AB{{ x }}"),
        (
            "{{ [{'a': 1, 'b': 2}, {'a': 3}]|selectattr('b')|list|length }}{{ [1, 2, 3]|select('gt', 1)|list }}",
            "1[2, 3]",
        ),
        (
            "{{ [{'a': 2}, {'a': 1}]|map(attribute='a')|list }}{{ [{'a': 2}, {'a': 1}]|sort(attribute='a') }}",
            "[2, 1][{'a': 1}, {'a': 2}]",
        ),
        (
            "{{ {'b': 1, 'a': 2}|dictsort }}{{ [3, 1, 3]|unique|list }}{{ [3, 1]|min }}{{ [3, 1]|max }}{{ [1, 2]|sum }}",
            "[('a', 2), ('b', 1)][3, 1]133",
        ),
        ("a\n  {%- if true +%}\n b{% endif %}\n\n {#- c -#} d", "a\n bd"),
        ("{{ 'it''s' }}{{ \"a\\tb\\u00e9\\x41\\q\" }}", "its{a}"),
        ("  {% if true %}\n  x\n  {%+ endif %}y\n", "  x\n  y"),
        ("{{ strftime_now('%Y-%m-%d') }}{# {{ comment }} #}{{ {'a': {'b': 1}}['a'].b }}", "2026-01-021"),
        (
            "{{ 'a\nb\n'.split('\n') }}{{ ' a  b '.split() }}{{ ' a b c'.split(None, 1) }}",
            "['a', 'b', '']['a', 'b']['a', 'b c']",
        ),
    ] {
        // These outputs contain no input text. Only the escape case is spelt separately.
        let want = want.replace("{a}", "a\tb\u{e9}A\\q");
        assert_eq!(marked(source).as_deref(), Ok(want.as_str()), "{source}");
    }
}

#[test]
fn text_grown_message_by_message_takes_linear_time() {
    let messages: Vec<_> = (0..20_000).map(|i| json!({"content": format!("{i:0200}")})).collect();
    let given = Inputs { own: Vec::new(), untrusted: vec![("messages", json!(messages))] };
    for source in [
        "{% set ns = namespace(out='') %}{% for m in messages %}{% set ns.out = ns.out ~ '<s>' ~ m.content ~ '\n' %}\
         {% if not ns.out.endswith('\n') %}no{% endif %}{% endfor %}{{ ns.out }}",
        "{% set ns = namespace(out='') %}{% for m in messages %}{% set ns.out = ns.out + '<s>' + (m.content + '\n') %}\
         {% endfor %}{{ ns.out }}",
    ] {
        let (text, own) =
            Template::parse(source).unwrap().render(&given, jiff::civil::DateTime::default()).unwrap();
        assert_eq!((text.len(), own.len()), (20_000 * 204, 20_001));
    }
}

#[test]
fn growing_text_leaves_shared_copies_unchanged() {
    for (source, want) in [
        (
            "{% set a = x %}{% set b = a %}{% set a = a ~ '!' %}{{ a }} {{ b }} {{ x }}",
            "«Ab c»! «Ab c» «Ab c»",
        ),
        ("{% set a = 'a' ~ x %}{% set a = a ~ a ~ a %}{{ a }}", "a«Ab c»a«Ab c»a«Ab c»"),
        ("{% set a = 'a' %}{% for i in 'xy' %}{% set a = a ~ i %}{{ a }}{% endfor %}{{ a }}", "axaya"),
        (
            "{% set ns = namespace(t='a') %}{% macro f() %}{% set ns.t = 'b' %}c{% endmacro %}\
             {% set ns.t = ns.t ~ f() ~ ns.t %}{{ ns.t }}",
            "acb",
        ),
        (
            "{% set l = ['a' ~ x] %}{% set a = l[0] %}{% set a = a + '!' %}{{ l[0] }}{{ a }}",
            "a«Ab c»a«Ab c»!",
        ),
        ("{% set a = 1 %}{% set a = a + 1 %}{% set a = a ~ 1 %}{% set a = a ~ '' %}{{ a }}", "21"),
    ] {
        assert_eq!(marked(source).as_deref(), Ok(want), "{source}");
    }
}

#[test]
fn edge_cases_match_jinja_and_python() {
    for (source, want) in [
        ("{% for i in 'ab' %}{% set z %}{{ i }}{% break %}{% endset %}{{ i }}{% endfor %}{{ z }}.", "."),
        (
            "{% for i in 'ab' %}{% filter upper %}{{ i }}{% if i == 'a' %}{% continue %}{% endif %}{% endfilter %}{% endfor %}",
            "B",
        ),
        (
            "{% for i in 'ab' %}{% continue %}{% else %}none{% endfor %}{% for i in 'a' %}{% else %}none{% endfor %}",
            "none",
        ),
        ("{% for i in 'ab' %}{% if i == 'b' %}{% break %}{% endif %}{% else %}none{% endfor %}", ""),
        ("{% generation %}{% set y = 1 %}{{ y }}{% endgeneration %}{{ y }}", "1"),
        ("{% if 1: %}a{% elif 2: %}b{% else: %}c{% endif %}{% for i in 'x': %}{{ i }}{% endfor %}", "ax"),
        ("{{ {'a': 1}.items is defined }}{{ {'items': 1}.items }}{{ {}.b is defined }}", "True1False"),
        (
            "{{ 'Hello'.find('l', 3) }}{{ 'éa'.find('a', 1, 2) }}{{ 'a'.find('', 2) }}{{ 'abab'.rfind('a', 0, -2) }}",
            "31-10",
        ),
        (
            "{{ 'Hello'.startswith('l', 2) }}{{ 'ab'.startswith(['x', 'b'], 1) }}{{ 'abc'.endswith('b', 0, -1) }}",
            "TrueTrueTrue",
        ),
        (
            "{{ 'aaa'.count('a', 1) }}{{ 'aaa'.count('a', -9, 1) }}{{ 'a'.startswith('', 1) }}{{ ''.startswith('', 1) }}",
            "21TrueFalse",
        ),
        (
            "{{ ' a b  c '.rsplit(None, 1) }}{{ 'a b'.rsplit(None, 5) }}{{ ' a '.rsplit(none, 0) }}",
            "[' a b', 'c']['a', 'b'][' a']",
        ),
        (
            "{{ ' a b '.split(None, 1) }}{{ ' a b '.split(None, 2) }}{{ ' '.split(None, 1) }}",
            "['a', 'b ']['a', 'b'][]",
        ),
        ("{{ '1_000'|int + '1_0.5'|float }}{{ '_1'|int(7) }}{{ '1__0'|int(8) }}", "1010.578"),
        ("{{ [[1]]|tojson(indent='-') }}{{ [1]|tojson(indent=-1) }}", "[\n-[\n--1\n-]\n][\n1\n]"),
        ("{% set f = {'a': 1}.items %}{{ f() }}{{ f is callable }}", "[('a', 1)]True"),
        ("{{ 1e300 // 1e-10 }} {{ -7.5 // 2 }} {{ 1 // 0.1 }} {{ -0.0 // 1 }}", "inf -4.0 9.0 -0.0"),
        (
            "{{ 1 % 0.1 }} {{ -7.5 % 2 }} {{ 7.5 % -2 }} {{ -1e-20 % 3 }} {{ 4.0 % -2 }}",
            "0.09999999999999995 0.5 -0.5 3.0 -0.0",
        ),
        (
            "{{ [1, 1.0, true]|max }}{{ ['b', 'B']|max }}{{ [2, 1.0, 1]|min }}{{ ['b', 'B']|min }}{{ []|max }}",
            "1b1.0b",
        ),
        (
            "{{ 5|round }} {{ 1250|round(-2) }} {{ 1350|round(-2) }} {{ -150|round(-2) }} {{ 7|round(2) }}",
            "5 1200 1400 -200 7",
        ),
        (
            "{{ 2.675|round(2) }} {{ 1.005|round(2) }} {{ 2.5|round }} {{ 42.55|round(1) }} {{ 1.25|round(1) }}",
            "2.67 1.0 2.0 42.5 1.2",
        ),
        ("{{ 2.1|round(1, 'ceil') }} {{ 2.19|round(1, 'floor') }} {{ 1250.0|round(-2) }}", "2.1 2.1 1200.0"),
        (
            "{{ ['a\\xa0\\xad\\u200b\\u2028\\ue000\\x07é\u{1f680}'] }}{{ ['\u{10ffff}'] }}",
            "['a\\xa0\\xad\\u200b\\u2028\\ue000\\x07é\u{1f680}']['\\U0010ffff']",
        ),
        (
            "{{ 'a\\r\\nb\\x0bc\\u2028\\rd\\n'.splitlines() }}{{ 'a\\r\\nb'.splitlines(true)|length }}{{ ''.splitlines() }}",
            "['a', 'b', 'c', '', 'd']2[]",
        ),
        (
            "{{ 'a\\r\\nb\\n\\nc\\n'|indent(1) }}|{{ ''|indent(1, true) }}|{{ 'a\\r'|indent }}",
            "a\n b\n\n c\n| |a",
        ),
    ] {
        assert_eq!(marked(source).as_deref(), Ok(want), "{source}");
    }
}

#[test]
fn list_methods_mutate_variables_only() {
    for (source, want) in [
        (
            "{% set l = [] %}{% for c in 'ab' %}{% set _ = l.append(c) %}{% endfor %}{{ l }}{{ l.append(1) }}",
            "['a', 'b']None",
        ),
        ("{% set ns = namespace(l=[x]) %}{% set _ = ns.l.append('y') %}{{ ns.l }}", "['«Ab c»', 'y']"),
        (
            "{% set ns = namespace(l=[1, 2, 3]) %}{{ ns.l.pop(0) }}{{ ns.l.pop() }}{{ ns.l.pop(-1) }}{{ ns.l }}",
            "132[]",
        ),
        ("{% set a = [1] %}{% set b = a.copy() %}{{ a.extend([2, 3]) }}{{ a }}{{ b }}", "None[1, 2, 3][1]"),
        ("{% set a = [1] %}{{ a.append(a) }}{{ a }}{{ {'k': 1}.copy() }}", "None[1, [1]]{'k': 1}"),
    ] {
        assert_eq!(marked(source).as_deref(), Ok(want), "{source}");
    }
    for source in
        ["{{ [].append(1) }}", "{% set a = [] %}{{ a.pop() }}", "{% set a = {'b': []} %}{{ a.b.append(1) }}"]
    {
        assert!(marked(source).is_err(), "{source}");
    }
}

#[test]
fn separators_must_be_text_or_none() {
    let source = "{{ ' a  b '.split(none) }}{{ 'a-b'.split('-') }}{{ ' a '.strip(none) }}";
    assert_eq!(marked(source).as_deref(), Ok("['a', 'b']['a', 'b']a"));
    for source in ["{{ 'a1b'.split(1) }}", "{{ 'a'.rsplit(['a']) }}", "{{ '1'.strip(1) }}"] {
        assert!(marked(source).is_err(), "{source}");
    }
}

#[test]
fn failures_are_reported_with_their_line() {
    for (source, line, want) in [
        ("a\n{{ 1 + 'a' }}", 2, "a number + text"),
        ("\n\n{{ nothing.x }}", 3, "'x' of an undefined value"),
        ("{{ f() }}", 1, "'f' is not a function"),
        ("{{ 1|nofilter }}", 1, "no filter 'nofilter'"),
        ("{{ 1 is notest }}", 1, "no test 'notest'"),
        ("{{ 'a'.nomethod() }}", 1, "no method 'nomethod'"),
        ("{% set a.b = 1 %}", 1, "'a' is not a namespace"),
        ("{{ 'a'|trim('b', 'c') }}", 1, "expected 1 arguments, got 2"),
        ("{{ 'a'|upper(x=1) }}", 1, "unknown argument 'x'"),
        ("{{ [1, 'a']|sort }}", 1, "cannot order"),
        ("\n{% endif %}", 2, "tag 'endif'"),
        ("{% if x %}", 1, "got the end"),
        ("{{ 'a }}", 1, "a string does not end"),
        ("{{ a ? b }}", 1, "unexpected character '?'"),
        ("{% break %}", 1, "tag 'break'"),
    ] {
        let rendered = Template::parse(source)
            .and_then(|template| template.render(&Inputs::default(), jiff::civil::DateTime::default()));
        match rendered {
            Err((Fault::Failed(message), at)) => {
                assert!(message.contains(want) && at == line, "{source}: line {at}: {message}");
            }
            other => panic!("{source}: {other:?}"),
        }
    }
}
