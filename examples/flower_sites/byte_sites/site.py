"""The process of a site, which stays up: `python -m byte_sites.site --task ... --folder ...`."""

import argparse
import importlib
import json
import pathlib

from jaxcomp.adapters import flower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=pathlib.Path, required=True, help="settings, as JSON")
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="of this site's own")
    args = parser.parse_args()
    config = json.loads(args.task.read_text())
    task = importlib.import_module(config["task"]).Task.of(config)
    site = flower.Site(
        task.build(),
        task.params(),
        task.data,
        folder=args.folder,
        metrics=lambda number, steps: {"tokens": task.tokens(steps)},
    )
    site.serve()


if __name__ == "__main__":
    main()
