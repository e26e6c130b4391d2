"""A whole run: three prompts, a scripted model on loopback, real sandboxes, rows in data/hello.

`python examples/hello.py`; with an endpoint of your own, leave out the server and give its address and a model name.
"""

import asyncio
import json
import tempfile
from pathlib import Path

from gristmill import ModelConfig, RunConfig, events, make_runner
from gristmill.testing.endpoint import ScriptedEndpoint, call, say

SCRIPT = [
    call("terminal", {"command": "uname -a"}, reasoning="Look at the machine first."),
    say("It runs Linux.", reasoning="The output says so."),
]


def listen(event: events.Event) -> None:
    if isinstance(event, events.SessionEnded):
        print(f"prompt {event.prompt_index}: {event.outcome} after {event.turns} turns")


async def main(prompts: Path) -> None:
    prompts.write_text("".join(json.dumps({"prompt": f"What machine is this? ({n})"}) + "\n" for n in range(3)))
    async with ScriptedEndpoint(SCRIPT) as endpoint:
        model = ModelConfig(name="scripted", base_url=endpoint.url)
        config = RunConfig(
            dataset_file=str(prompts), batch_size=10, run_name="hello", distribution="terminal_only", model=model
        )
        runner = await make_runner(config, listen, in_process=True)
        report = await runner.run()
    print(f"{report.statistics['reconcile']['kept']} trajectories in data/hello/trajectories.jsonl")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(main(Path(place) / "prompts.jsonl"))
