"""The starter model's chat template: that of its file, and tools, which its file leaves out."""

from __future__ import annotations

import json

from .tool_block import HEAD, TAIL

_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

# Without tools and calls it writes what the model's own template writes.
TEMPLATE = (
    "{% set first = messages[0] %}"
    f"{{% set system = first.content if first.role == 'system' else {json.dumps(_SYSTEM)} %}}"
    "{{ '<|im_start|>system\n' + system }}"
    "{% if tools %}"
    f"{{{{ '\n\n' + {json.dumps(HEAD)} }}}}"
    "{% for tool in tools %}{{ ('' if loop.first else '\n') + tool | tojson }}{% endfor %}"
    f"{{{{ {json.dumps(TAIL)} }}}}"
    "{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif not (loop.first and message.role == 'system') %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{% set function = call.function or call %}"
    "{{ '\n' if message.content or not loop.first }}"
    "{{ '<tool_call>\n{\"name\": ' + function.name | tojson + ', \"arguments\": ' }}"
    "{{ function.arguments if function.arguments is string else function.arguments | tojson }}"
    "{{ '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
