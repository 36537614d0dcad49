//! Built-in chat templates, selected by name for files that carry no template or a broken one. Some
//! files carry such a name instead of a template.

/// Names and sources of the built-in templates.
pub const BUILTIN: [(&str, &str); 6] = [
    ("chatml", CHATML),
    ("llama3", LLAMA3),
    ("gemma", GEMMA),
    ("mistral", MISTRAL),
    ("phi3", PHI3),
    ("rwkv-world", RWKV_WORLD),
];

/// Returns the built-in template `name`.
pub fn builtin(name: &str) -> Option<&'static str> {
    BUILTIN.into_iter().find_map(|(known, source)| (known == name).then_some(source))
}

/// The format of Qwen, Hermes, SmolLM and many others.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' \
                      + message.content + '<|im_end|>\n' }}{% endfor %}\
                      {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

const LLAMA3: &str = "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message.role \
                      + '<|end_header_id|>\n\n' + message.content|trim + '<|eot_id|>' }}{% endfor %}\
                      {% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\
                      {% endif %}";

/// Gemma's format has no system turn: instructions precede the first user message.
const GEMMA: &str = "{{ bos_token }}{% set ns = namespace(first='') %}{% for message in messages %}\
                     {% if message.role == 'system' %}{% set ns.first = message.content|trim + '\n\n' %}{% else %}\
                     {{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' \
                     + ns.first + message.content|trim + '<end_of_turn>\n' }}{% set ns.first = '' %}\
                     {% endif %}{% endfor %}\
                     {% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}";

/// Mistral's format also prepends instructions to the first user message.
const MISTRAL: &str = "{{ bos_token }}{% set ns = namespace(first='') %}{% for message in messages %}\
                       {% if message.role == 'system' %}{% set ns.first = message.content + '\n\n' %}\
                       {% elif message.role == 'assistant' %}{{ message.content + eos_token }}{% else %}\
                       {{ '[INST] ' + ns.first + message.content + ' [/INST]' }}{% set ns.first = '' %}\
                       {% endif %}{% endfor %}";

const PHI3: &str = "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}\
                    {% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}";

/// RWKV's format, whose turns end with an empty line. The last system message precedes all others,
/// and earlier reasoning is dropped.
const RWKV_WORLD: &str = "{{ bos_token }}{% set ns = namespace(system='') %}\
                          {% for message in messages %}{% if message.role == 'system' %}\
                          {% set ns.system = message.content %}{% endif %}{% endfor %}\
                          {% if ns.system != '' %}{{ 'System: ' + ns.system + '\n\n' }}{% endif %}\
                          {% for message in messages %}{% if message.role == 'user' %}\
                          {{ 'User: ' + message.content|trim + '\n\n' }}\
                          {% elif message.role == 'assistant' and message.content is not none %}\
                          {{ 'Assistant: ' + message.content.split('</think>')[-1]|trim + '\n\n' }}\
                          {% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}\
                          {% if enable_thinking is true %}{{ ' <think>' }}\
                          {% elif enable_thinking is false %}{{ ' <think>\n</think>' }}\
                          {% endif %}{% endif %}";
