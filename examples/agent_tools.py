"""An agent with a calculator: generate up to a call, run it, force its result in, go on."""

from __future__ import annotations

import ast
import operator

from cotrt import LLM, Branch

PROMPT = """\
Question: A box holds 24 eggs. How many eggs are in 17 boxes?
Thought: I have to multiply. Call: calc[24 * 17] = 408
Answer: 408

Question: I had 1250 coins and spent 377. How many are left?
Thought: I have to subtract. Call: calc[1250 - 377] = 873
Answer: 873

Question: A train has 38 wagons with 62 seats each. How many seats does it have?
Thought:"""

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calc(expression: str) -> str:
    """Two whole numbers with +, - or * between them; a mistake becomes an observation."""
    match ast.parse(expression.strip(), mode="eval").body:
        case ast.BinOp(ast.Constant(int(a)), op, ast.Constant(int(b))) if type(op) in OPERATIONS:
            return str(OPERATIONS[type(op)](a, b))
    raise ValueError(f"cannot compute {expression!r}")


def run(branch: Branch, max_calls: int = 3) -> str:
    """Let the branch think and call until it answers."""
    for _ in range(max_calls):
        thought = branch.generate(max_tokens=40, stop=["]", "\n\n"], temperature=0.0).result()
        if thought.stop_reason != "]":
            break
        try:
            result = calc(thought.text.rpartition("calc[")[2])
        except (SyntaxError, ValueError) as error:
            result = f"error: {error}"
        branch.extend(f" = {result}\nAnswer:", special=False)
    return branch.generate(max_tokens=12, stop="\n", temperature=0.0).result().text.strip()


def main() -> None:
    with LLM("smollm2-135m") as llm:
        branch = llm.branch(PROMPT)
        start = len(branch)
        answer = run(branch, max_calls=1)
        print(branch.decode(start, len(branch)).strip())
        print(f"answer: {answer}; it is {38 * 62}")


if __name__ == "__main__":
    main()
