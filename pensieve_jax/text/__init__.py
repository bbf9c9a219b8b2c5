"""Text at the edge of the engine: from text to ids, from ids to streamed text, from messages to a turn's ids.

Owns: the tokenizer wrapper, incremental detokenization with stop strings, and chat templates.
Does not know: jax, conversations' KV state, scheduling, or where a history is stored.
"""

from pensieve_jax.text.chat import ChatFormat, EarlierTurn, TurnPrompt
from pensieve_jax.text.detokenizer import IncrementalDetokenizer
from pensieve_jax.text.loading import CHAT_TEMPLATE, byte_tokenizer, load_tokenizer
from pensieve_jax.text.messages import ROLES, Message, check_messages
from pensieve_jax.text.replies import ReplyReader
from pensieve_jax.text.reply_tokens import ReplyTokens
from pensieve_jax.text.tokenizer import Tokenizer
from pensieve_jax.text.tools import Tool, check_tools
from pensieve_jax.text.transcript import num_messages_held

__all__ = [
    "CHAT_TEMPLATE",
    "ROLES",
    "ChatFormat",
    "EarlierTurn",
    "IncrementalDetokenizer",
    "Message",
    "ReplyReader",
    "ReplyTokens",
    "Tokenizer",
    "Tool",
    "TurnPrompt",
    "byte_tokenizer",
    "check_messages",
    "check_tools",
    "load_tokenizer",
    "num_messages_held",
]
