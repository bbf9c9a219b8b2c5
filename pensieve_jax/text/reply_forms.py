"""The place of a form in a reply: behind its reasoning, behind a prefill, or beside calls of tools.

Owns: the rules, for `LLM.chat` and every API.
Does not know: the fields that ask for a form, what a call looks like, or how masks are made (`text.grammar`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.structured import MAX_GRAMMAR_BYTES, WHOLE, StructuredOutput
from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.text.tokenizer import Tokenizer
from pensieve_jax.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS
from pensieve_jax.text.tool_grammars import call_grammar, final_message
from pensieve_jax.text.tools import Tool, tool_names

_CHANNELS: Final = "harmony"
"""The format in which headers say what a message of the reply is."""


def with_form(template: TemplateInput, form: StructuredOutput | None) -> TemplateInput:
    """Return the input of a turn with whether its reply has a form, as `form` or calls beside it.

    A form that says itself what stands around it changes nothing, since this may be any text.
    """
    if form is None or form.after or form.frame:
        return template
    return replace(template, reply=replace(template.reply, has_form=True))


def with_placed_form(
    params: SamplingParams,
    template: TemplateInput,
    prompt_token_ids: Sequence[int],
    tokenizer: Tokenizer | None,
) -> SamplingParams:
    """Return the parameters of a turn with its form, if it has one, in its place; see `placed_form`."""
    if params.structured is None or tokenizer is None:
        return params
    return replace(params, structured=placed_form(params.structured, template, prompt_token_ids, tokenizer))


def placed_form(
    form: StructuredOutput, template: TemplateInput, prompt_token_ids: Sequence[int], tokenizer: Tokenizer
) -> StructuredOutput:
    """Return a form that begins behind the reasoning of a turn's reply, and goes on behind its prefill.

    Reasoning is demanded if the prompt begins it. Otherwise the reply may begin it, as models do that choose
    whether to think. A reply has none if the prompt ends with the mark that ends reasoning, as templates
    write it that are told not to think. A form that says itself what it stands behind stays as it is.
    Replies of gpt-oss have headers, and the form is that of the message for the user, unless a prefill has
    begun that.
    """
    if form.after or form.prefill:
        return form
    form = replace(form, prefill=template.prefill or "")
    name = template.reply.reasoning
    if _CHANNELS in (name, template.reply.calls):
        has_header = bool(form.frame) or template.prefill is not None
        return form if has_header else replace(form, frame=final_message(tokenizer))
    row = REASONING_FORMATS[name] if name else None
    if row is None or not row.end:
        return form
    if template.prefill is None and tokenizer.ends_with(prompt_token_ids, row.end):
        return form
    return replace(form, after=row.end, opening="" if template.reply.is_open else row.start)


def form_of_calls(
    tools: Sequence[Tool],
    template: TemplateInput,
    tokenizer: Tokenizer,
    *,
    has_one_call: bool = False,
) -> StructuredOutput:
    """Return the form of a reply that is one or more calls of these tools, with the schemas' arguments."""
    row = TOOL_FORMATS[template.reply.calls]
    grammar = call_grammar(row, tools, tokenizer, has_one_call=has_one_call, shown=template.tools)
    return StructuredOutput("grammar", _checked_size(grammar), frame=WHOLE)


def form_with_calls(
    form: StructuredOutput | None,
    tools: Sequence[Tool],
    template: TemplateInput,
    tokenizer: Tokenizer,
    *,
    strict: Collection[str] = (),
    has_one_call: bool = False,
) -> StructuredOutput | None:
    """Return the form of a reply that may call these tools; None if any reply may be given.

    Any may without `form` if the tools are all of the turn's, and none of them is strict.

    Args:
      form: the form of a reply without calls; None if that is any text, which may also precede calls.
      tools: the tools that may be called, at least one.
      template: what the turn is rendered with, with how its calls are read.
      tokenizer: the model's tokenizer.
      strict: names of tools whose arguments follow their schemas; those of others are any.
      has_one_call: whether the reply ends behind its first call.

    Returns `form` itself where a prefill has begun a text that no call can follow.
    """
    row = TOOL_FORMATS[template.reply.calls]
    if (row.name == _CHANNELS and template.prefill is not None) or (form is not None and form.frame):
        return form
    names = tool_names(tools)
    free = [name for name in names if name not in strict]
    has_form = form is not None
    if not has_form and len(free) == len(names) == len(template.tools):
        return None
    grammar = call_grammar(
        row,
        tools,
        tokenizer,
        has_one_call=has_one_call,
        has_text=not has_form,
        has_form=has_form,
        free=free,
        shown=template.tools,
    )
    if form is None:
        return StructuredOutput("grammar", _checked_size(grammar), frame=WHOLE)
    return replace(form, frame=_checked_size(grammar))


def _checked_size(grammar: str) -> str:
    """Return a grammar of calls; raise InvalidRequestError, naming `tools`, for one that is too large."""
    num_bytes = len(grammar.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        limit = f"at most {MAX_GRAMMAR_BYTES} bytes; shorten schemas, or let tool_choice allow fewer tools"
        raise InvalidRequestError("tools", f"a grammar of {num_bytes} bytes", limit)
    return grammar
