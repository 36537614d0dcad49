"""The texts of text encoders."""

TEXTS = [
    "A cat sleeps on the mat.",
    "x",
    "",
    "   \t\n ",
    "def f(x):\n    return {k: v**2 for k, v in x.items() if v != 0}  # squares",
    "Zürich, naïve café — ÀÉÎÕÜ ñ İstanbul ß ŒUVRE",
    "北京是中国的首都。東京は日本の首都です。",
    "Привет, мир! Как дела?",
    "🚀🔥 emoji \u200d and \ufeff zero widths \u0000 \ufffd",
    "The quick brown fox jumps over the lazy dog. " * 60,
    "a" * 101 + " " + "b" * 100 + " " + "pneumonoultramicroscopicsilicovolcanoconiosis",
    "[CLS] [MASK] special [SEP] tokens <s> </s> <mask> <pad2>",
    '$3.50 + 2^10 == `1024`; ~50% | <tag attr="v">&amp;</tag>',
    "café re\u0301sume\u0301 हिन्दी नमस्ते العربية ▁under",
]
PAIRS = [
    ["What sleeps on the mat?", "A cat sleeps on the mat."],
    ["What sleeps on the mat?", ""],
    ["", "x"],
    ["x " * 200, "A cat. " * 300],
    ["A cat. " * 300, "x " * 200],
    ["cat", "The lazy dog. " * 100],
    ["Zürich [SEP] 北京", "[CLS] mat"],
]
