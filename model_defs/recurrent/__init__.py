"""Recurrent and tree models as cells: LSTM, Seq2Seq, TreeLSTM and Mamba, for an engine that batches cells.

This package knows no engine. The names imported here are public.
"""

from model_defs.recurrent.cells import RecurrentCell
from model_defs.recurrent.errors import RequestError
from model_defs.recurrent.lstm import LSTM, LSTMConfig, LSTMRequest
from model_defs.recurrent.mamba import Mamba, MambaRequest
from model_defs.recurrent.mamba_config import MambaConfig
from model_defs.recurrent.seq2seq import Seq2Seq, Seq2SeqConfig, Seq2SeqRequest
from model_defs.recurrent.tree import BinaryTree
from model_defs.recurrent.tree_lstm import TreeLSTM, TreeLSTMConfig

__all__ = [
    "LSTM",
    "BinaryTree",
    "LSTMConfig",
    "LSTMRequest",
    "Mamba",
    "MambaConfig",
    "MambaRequest",
    "RecurrentCell",
    "RequestError",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Seq2SeqRequest",
    "TreeLSTM",
    "TreeLSTMConfig",
]
