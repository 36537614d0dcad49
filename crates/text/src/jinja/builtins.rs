//! Edge cases of filters, methods and operators. Expected outputs are those of Jinja 3.1.6 in the
//! environment that `transformers` sets up for chat templates.

use super::Fault;
use super::tests::marked;

fn assert_all(cases: &[(&str, &str)]) {
    for (source, want) in cases {
        assert_eq!(marked(source).as_deref(), Ok(*want), "{source}");
    }
}

/// Asserts that each template fails with an error that contains the given text.
fn assert_refused(cases: &[(&str, &str)]) {
    for (source, want) in cases {
        match marked(source) {
            Err(Fault::Failed(message)) => assert!(message.contains(want), "{source}: {message}"),
            other => panic!("{source}: {other:?}"),
        }
    }
}

#[test]
fn percent_formats_values_as_python() {
    assert_all(&[
        (
            "{{ '%s: %d' % ('a', 3) }}|{{ '%s' % 'b' }}|{{ '%s %s' % (1, 'b') }}|{{ '%%' % () }}",
            "a: 3|b|1 b|%",
        ),
        // A list is one value; a tuple supplies each of its items.
        ("{{ '%s' % [1, 2] }}|{{ '%s' % (1,) }}|{{ '%s' % [] }}", "[1, 2]|1|[]"),
        ("{% for pair in {'k': 1}.items() %}{{ '%s=%s' % pair }}{% endfor %}", "k=1"),
        (
            "{{ '%5s|%-5s|%05d|%+d|% d|%x|%X|%#x|%o|%c|%c' % ('a', 'b', 42, 7, 7, 255, 255, 255, 8, 65, 'z') }}",
            "    a|b    |00042|+7| 7|ff|FF|0xff|10|A|z",
        ),
        (
            "{{ '%.2f %5.1f %e %g %g %g %G %.3s' % (3.14159, 2.25, 12345.678, 0.0001, 1e20, 100000.0, 1e-10, 'abcdef') }}",
            "3.14   2.2 1.234568e+04 0.0001 1e+20 100000 1E-10 abc",
        ),
        (
            "{{ '%(a)s-%(b)03d' % {'a': 1, 'b': 2} }}|{{ '%s' % {'a': 1} }}|{{ 'a' % {'a': 1} }}|{{ '%r %s' % ('a', none) }}",
            "1-002|{'a': 1}|a|'a' None",
        ),
        ("{{ '%s' % true }}|{{ '%d' % 3.9 }}|{{ '%d' % -3.9 }}|{{ '%d' % true }}", "True|3|-3|1"),
        (
            "{{ '%*d|%-*d|%.*f' % (5, 42, 5, 42, 2, 3.14159) }}|{{ '%05.1f|%+.0e|%#.0f|%i|%u' % (2.55, 15.0, 3.0, -3, 4) }}",
            "   42|42   |3.14|002.5|+2e+01|3.|-3|4",
        ),
        ("{{ '%-05d|%+5d|%05d|%.3d|%x' % (1, 2, -3, 5, -255) }}", "1    |   +2|-0003|005|-ff"),
        (
            "{{ '%g|%g|%g|%#g|%.0g|%g' % (1.5, 1e-5, 123456789.0, 1.5, 25.0, 0) }}|{{ '%f' % 1e16 }}|{{ '%5.2e' % 0 }}",
            "1.5|1e-05|1.23457e+08|1.50000|2e+01|0|10000000000000000.000000|0.00e+00",
        ),
        ("{{ '%ld' % 3 }}{{ '%5c|' % 'a' }}{{ '%a' % 'é' }}{{ '(%5s)' % 'é' }}", "3    a|'\\xe9'(    é)"),
        (
            "{{ '%s %s'|format('a', 1) }}|{{ '%(k)s'|format(k=3) }}|{{ '%s'|format([1]) }}|{{ 'a'|format() }}",
            "a 1|3|[1]|a",
        ),
        // Input text stays marked as input.
        ("{{ '<%s>' % x }}{{ '%.2s' % x }}{{ (x + '%d') % 3 }}", "<«Ab c»>«AbAb c»3"),
    ]);
    assert_refused(&[
        ("{{ '%s %s' % ('a',) }}", "not enough values"),
        ("{{ '%s' % () }}", "not enough values"),
        ("{{ '%s' % ('a', 'b') }}", "does not write all values"),
        ("{{ 'a' % 1 }}", "does not write all values"),
        ("{{ '%d' % 'a' }}", "'%d' expects a number, got text"),
        ("{{ '%x' % 1.5 }}", "'%x' expects a number"),
        ("{{ '%y' % 1 }}", "no '%y'"),
        ("{{ '%(k)s' % 1 }}", "expects a mapping"),
        ("{{ '%(k)s' % {} }}", "requires 'k'"),
        ("{{ '%(k' % {} }}", "does not end"),
        ("{{ '%' % () }}", "ends after '%'"),
        ("{{ '%c' % 1114112 }}", "'%c' expects"),
        ("{{ '%99999999999999999999999999999999999999999999s' % 1 }}", "4096 characters"),
        ("{{ '%.4097f' % 1 }}", "4096 characters"),
        ("{{ '%s'|format(1, k=2) }}", "by position or by name"),
    ]);
}

#[test]
fn tuples_print_as_tuples() {
    assert_all(&[
        ("{{ (1, 2) }}{{ (1,) }}{{ () }}{{ (1, 2)|tojson }}{{ (1, [2]) }}", "(1, 2)(1,)()[1, 2](1, [2])"),
        (
            "{{ {'a': 1}.items()|list }}{{ {'b': 1}|dictsort }}{{ {'a': 1}|items|list }}",
            "[('a', 1)][('b', 1)][('a', 1)]",
        ),
    ]);
}

#[test]
fn texts_are_searched_partitioned_and_padded() {
    assert_all(&[
        (
            "{{ 'abc'.index('c') }}{{ 'abcab'.rindex('ab') }}{{ 'abc'.index('b', 1, 2) }}{{ 'éa'.index('a') }}",
            "2311",
        ),
        (
            "{{ 'a-b-c'.partition('-') }}{{ 'a-b-c'.rpartition('-') }}{{ 'abc'.partition('-') }}{{ 'abc'.rpartition('-') }}",
            "('a', '-', 'b-c')('a-b', '-', 'c')('abc', '', '')('', '', 'abc')",
        ),
        (
            "{{ 'ab'.center(7, '*') }}|{{ 'abc'.center(6) }}|{{ 'abc'.center(8, '*') }}|{{ 'ab'.center(1) }}",
            "***ab**| abc  |**abc***|ab",
        ),
        (
            "{{ 'ab'.ljust(4, '.') }}|{{ 'ab'.rjust(4) }}|{{ 'foo bar'|center(11) }}|{{ 'ab'|center(5) }}",
            "ab..|  ab|  foo bar  |  ab ",
        ),
        (
            "{{ '7'.zfill(3) }}|{{ '-7'.zfill(4) }}|{{ '+'.zfill(3) }}|{{ 'aBß'.swapcase() }}",
            "007|-007|+00|AbSS",
        ),
        (
            "{{ '{} {}'.format('a', 1) }}|{{ '{1}{0}'.format('a', 'b') }}|{{ '{k}{k}'.format(k=2) }}|{{ '{{}}{}'.format(none) }}",
            "a 1|ba|22|{}None",
        ),
        ("{{ x.center(9, '.') }}{{ x.partition('b')[0] }}{{ '<{}>'.format(x) }}", "...«Ab c»..«A»<«Ab c»>"),
    ]);
    assert_refused(&[
        ("{{ 'abc'.index('z') }}", "no such substring"),
        ("{{ 'abc'.rindex('a', 1) }}", "no such substring"),
        ("{{ 'a'.partition('') }}", "cannot split by an empty text"),
        ("{{ 'a'.center(3, 'xy') }}", "one character"),
        ("{{ 'a'.ljust(99999999999) }}", "at most"),
        ("{{ '{}'.format() }}", "no value for '{}'"),
        ("{{ '{:d}'.format(1) }}", "no value for '{:d}'"),
        ("{{ '{'.format(1) }}", "single '{'"),
        ("{{ '}'.format(1) }}", "single '}'"),
    ]);
}

#[test]
fn words_are_counted_and_texts_are_truncated() {
    assert_all(&[
        (
            "{{ 'foo bar baz'|wordcount }}{{ \"don't  stop\"|wordcount }}{{ ''|wordcount }}{{ 'é_1 2'|wordcount }}",
            "3302",
        ),
        ("{{ 'foo bar baz qux'|truncate(9) }}|{{ 'foo bar baz qux'|truncate(9, True) }}", "foo...|foo ba..."),
        // The default leeway is 5.
        (
            "{{ 'foo bar baz qux'|truncate(11) }}|{{ 'foo bar baz qux'|truncate(11, False, '...', 0) }}",
            "foo bar baz qux|foo bar...",
        ),
        (
            "{{ 'foo bar baz qux'|truncate(length=9, end='!', leeway=0) }}|{{ 'abcdefghijklmno'|truncate(5) }}|{{ 'ab'|truncate(3, leeway=0) }}",
            "foo bar!|ab...|ab",
        ),
        (
            "{{ x|truncate(3, true, '', 0) }}{{ x|truncate(3, true, '.', 0) }}",
            "«AbAb».".replace("AbAb", "Ab Ab").as_str(),
        ),
        ("{{ '<&'|forceescape }}", "&lt;&amp;"),
    ]);
    assert_refused(&[
        ("{{ 'abc'|truncate(2) }}", "3 or more, got 2"),
        ("{{ 'abc'|truncate('2') }}", "expects a number"),
    ]);
}

#[test]
fn items_come_in_groups() {
    assert_all(&[
        (
            "{{ [1, 2, 3, 4, 5]|batch(2)|list }}{{ [1, 2, 3]|batch(2, 0)|list }}{{ []|batch(2)|list }}{{ 'abc'|batch(2)|list }}",
            "[[1, 2], [3, 4], [5]][[1, 2], [3, 0]][][['a', 'b'], ['c']]",
        ),
        (
            "{{ [1, 2, 3, 4, 5]|slice(2)|list }}{{ [1, 2, 3, 4, 5]|slice(3, 'x')|list }}{{ [1]|slice(3)|list }}{{ []|slice(2)|list }}",
            "[[1, 2, 3], [4, 5]][[1, 2], [3, 4], [5, 'x']][[1], [], []][[], []]",
        ),
        ("{{ [1, 2, 3, 4]|slice(2, 'x')|list }}", "[[1, 2, 'x'], [3, 4, 'x']]"),
        (
            "{% for g in [{'r': 'b', 'n': 1}, {'r': 'a', 'n': 2}, {'r': 'b', 'n': 3}]|groupby('r') %}\
             {{ g.grouper }}:{{ g.list|map(attribute='n')|join(',') }};{% endfor %}",
            "a:2;b:1,3;",
        ),
        (
            "{% for k, l in [{'r': 'B'}, {'r': 'a'}, {'r': 'b'}]|groupby('r') %}{{ k }}{{ l|length }};{% endfor %}\
             {% for k, l in [{'r': 'B'}, {'r': 'a'}, {'r': 'b'}]|groupby('r', case_sensitive=true) %}{{ k }}{{ l|length }};{% endfor %}",
            "a1;B2;B1;a1;b1;",
        ),
        (
            "{% for k, l in [{'r': 1}, {}]|groupby('r', default=0) %}{{ k }}{{ l|length }};{% endfor %}\
             {% for k, l in [{'a': {'b': 2}}, {'a': {'b': 1}}]|groupby('a.b') %}{{ k }};{% endfor %}{{ []|groupby('a') }}",
            "01;11;1;2;[]",
        ),
        (
            "{{ [{'r': 1}]|groupby('r') }}{{ [message]|groupby('n')|map(attribute=0)|list }}",
            "[(1, [{'r': 1}])][3]",
        ),
    ]);
    assert_refused(&[
        ("{{ [1]|batch(0) }}", "above 0"),
        ("{{ [1]|slice(-1) }}", "above 0"),
        ("{{ [1]|batch }}", "'linecount' is missing"),
        ("{{ [{'r': 1}, {'r': 'a'}]|groupby('r') }}", "cannot order"),
    ]);
    // Untrusted sizes must not create unbounded lists.
    assert!(matches!(marked("{{ [1]|batch(99999999999, 0) }}"), Err(Fault::Bytes | Fault::Steps)));
    assert!(matches!(marked("{{ []|slice(99999999999) }}"), Err(Fault::Bytes | Fault::Steps)));
}

#[test]
fn a_recursive_loop_calls_itself() {
    assert_all(&[
        (
            "{% for n in [{'v': 1, 'c': [{'v': 2, 'c': [{'v': 3}]}, {'v': 4}]}] recursive %}\
             <{{ n.v }}@{{ loop.depth }}{{ loop.depth0 }}{{ loop.index }}{{ loop.last }}{% if n.c %}{{ loop(n.c) }}{% endif %}>{% endfor %}",
            "<1@101True<2@211False<3@321True>><4@212True>>",
        ),
        // The loop body sees the variables around the loop, not those set by its own iterations.
        (
            "{% set y = 1 %}{% for n in [[[]], []] recursive %}{% set y = y + 1 %}{{ y }}{{ loop(n) }}{% else %}-{% endfor %}",
            "22-2-",
        ),
        (
            "{% for n in [1, [2, [3]], 4] if n != 4 recursive %}{{ loop(n) if n is sequence else n }}{% if n == 2 %}{% break %}{% endif %}{% endfor %}",
            "12",
        ),
        (
            "{% for n in [x, [x]] recursive %}{{ loop(n) if n is not string else n }}.{% endfor %}",
            "«Ab c».«Ab c»..",
        ),
    ]);
    assert_refused(&[
        ("{% for n in [1] %}{{ loop(n) }}{% endfor %}", "'recursive'"),
        ("{% for n in [1] recursive %}{{ loop() }}{% endfor %}", "'iterable' is missing"),
    ]);
    assert_eq!(marked("{% for n in [1] recursive %}{{ loop([n]) }}{% endfor %}"), Err(Fault::Depth));
}
