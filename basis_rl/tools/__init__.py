"""Tools that a model may call while it answers: Python in a sandbox, a calculator, or your own functions."""

from basis_rl.tools.base import ConcurrentTool, ToolBroken, ToolResult
from basis_rl.tools.calculator import calculator
from basis_rl.tools.chat import chat_template
from basis_rl.tools.python import PythonTool

# name in a recipe -> a function, or a class whose objects are tools
TOOLS = {"calculator": calculator, "python": PythonTool}

__all__ = ["TOOLS", "ConcurrentTool", "PythonTool", "ToolBroken", "ToolResult", "calculator", "chat_template"]
