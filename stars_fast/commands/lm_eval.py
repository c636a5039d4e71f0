"""`stars-fast lm-eval`: lm-eval's own command line, with our model and our tasks known to it."""

import sys
import traceback
from collections.abc import Sequence
from typing import Any

from stars_fast.base.errors import ConfigError
from stars_fast.base.optional import need
from stars_fast.evaluation.harness import TASK_FOLDER


def main(words: Sequence[str]) -> int:
    """Run lm-eval with `words` as its arguments; returns its exit code.

    Raises:
        SystemExit: as lm-eval does.
        ConfigError: lm-eval is not installed.
    """
    register()
    cli = need("lm_eval._cli", "stars-fast lm-eval").HarnessCLI
    need("lm_eval.utils", "stars-fast lm-eval").setup_logging()
    before = sys.argv
    sys.argv = ["lm-eval", *words]  # where it reads them
    try:
        parser = cli()
        args = parser.parse_args()
    finally:
        sys.argv = before
    if hasattr(args, "include_path"):
        args.include_path = [str(TASK_FOLDER), *_own_tasks(args)]
    try:
        parser.execute(args)
    except ConfigError:
        raise
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        if not _of_an_input(error):
            raise
        raise ConfigError(f"lm-eval: {' '.join(str(error).split())}") from error
    return 0


def _of_an_input(error: Exception) -> bool:
    """Whether an error is lm-eval's refusal of what it was given, or a lack of network, rather than
    a mistake in the code of a model."""
    if isinstance(error, OSError):
        return error.errno is None or isinstance(error, ConnectionError)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    module = [name for name in modules if name != "torch"][-1]  # which is asked for a dtype by name
    return module.startswith("lm_eval.") or module == "stars_fast.evaluation.lm_model"


def register() -> None:
    """Make the model `stars_fast` known to lm-eval, to be imported when it is asked for."""
    need("lm_eval.models", "stars-fast lm-eval")  # first, or lm-eval would not list its own
    registry = need("lm_eval.api.registry", "stars-fast lm-eval").model_registry
    if "stars_fast" not in registry:
        registry.register("stars_fast", target="stars_fast.evaluation.lm_model:StarsFastLM")


def _own_tasks(args: Any) -> list[str]:
    """Folders of tasks that the user names, in the arguments or in a file of them."""
    given = getattr(args, "include_path", None)
    if given is None and getattr(args, "config", None):
        config = need("lm_eval.config.evaluate_config", "stars-fast lm-eval").EvaluatorConfig
        given = config.load_yaml_config(args.config).get("include_path")
    return [given] if isinstance(given, str) else list(given or ())
