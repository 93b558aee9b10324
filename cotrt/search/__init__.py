"""Reasoning on branches: search algorithms, votes, agents, budgets, and the trees they grow.

Every search is an async function ``name(root, prompt=None, *, params=None, budget=None,
on_event=None, ...)`` that runs under asyncio and trio; `cotrt.run` runs one from sync code.
"""

from __future__ import annotations

from cotrt.search.answers import boxed, final_answer, last_number
from cotrt.search.best_of_n import best_of_n
from cotrt.search.budget import Budget
from cotrt.search.diverse_verifier_tree_search import diverse_verifier_tree_search
from cotrt.search.events import JsonLog, SearchEvent
from cotrt.search.mcts import mcts
from cotrt.search.probe_early_exit import probe_early_exit
from cotrt.search.rebase import rebase
from cotrt.search.result import SearchResult, Usage, Vote, VoteRow, VoteTable
from cotrt.search.run import run
from cotrt.search.run_agent import run_agent
from cotrt.search.run_many import run_many
from cotrt.search.scorers import Judge, ask, mean_logprob
from cotrt.search.self_consistency import self_consistency
from cotrt.search.self_refine import Critique, self_refine
from cotrt.search.step_beam_search import step_beam_search
from cotrt.search.tool_calls import ToolCall, ToolFormat, parse_tool_calls
from cotrt.search.tools import tool_schema
from cotrt.search.tree import Candidate, Node, SearchTree
from cotrt.search.tree_of_thoughts import tree_of_thoughts

__all__ = [
    "Budget",
    "Candidate",
    "Critique",
    "JsonLog",
    "Judge",
    "Node",
    "SearchEvent",
    "SearchResult",
    "SearchTree",
    "ToolCall",
    "ToolFormat",
    "Usage",
    "Vote",
    "VoteRow",
    "VoteTable",
    "ask",
    "best_of_n",
    "boxed",
    "diverse_verifier_tree_search",
    "final_answer",
    "last_number",
    "mcts",
    "mean_logprob",
    "parse_tool_calls",
    "probe_early_exit",
    "rebase",
    "run",
    "run_agent",
    "run_many",
    "self_consistency",
    "self_refine",
    "step_beam_search",
    "tool_schema",
    "tree_of_thoughts",
]
