"""`medflare job`: a federation as a FLARE job folder."""

import argparse
import shlex
from pathlib import Path

from medflare.cli.options import Commands, add_command, add_federation_options, chosen_method, hyper_and_task, run_arguments


def add_commands(commands: Commands) -> None:
    """Declare it."""
    parser = add_command(
        commands,
        "job",
        _job,
        help="write a FLARE job folder for the simulator, POC or production",
        description="Write a FLARE job folder for the simulator, POC or production. `medflare job watch` and `medflare job list` look at "
        "the jobs of a federation.",
        examples=(
            "medflare job fedsm --task brain_lgg --rounds 20 --set lam=0.3 --out jobs/my_fedsm",
            "medflare job fedsm --no-byoc --out jobs/my_fedsm          # for hospitals that take no code",
            "medflare job evaluate --model MODEL --no-byoc --out jobs/test   # every site tests it, nobody trains",
            "medflare job fingerprint --task draft.json --no-byoc --out jobs/look   # what the sites have, for medflare plan",
            "medflare job fedsm --step-timeout 600 --min-sites 3 --out jobs/my_fedsm",
        ),
    )
    add_federation_options(parser)
    parser.add_argument("--out", type=Path, required=True, help="job folder to write")
    parser.add_argument("--track", metavar="mlflow[=URI]", help="the server's curves go to MLflow too (medflare[mlflow])")
    form = parser.add_argument_group("form (default: app/custom/ with a README, the place for classes of your own; medflare is installed)")
    form.add_argument("--no-byoc", action="store_true", help="without app/custom/: what hospitals accept that refuse jobs with code")
    form.add_argument("--embed-code", action="store_true", help="app/custom/ holds medflare: sites need torch, monai and nvflare only")


def _job(options: argparse.Namespace) -> int:
    from medflare.evaluation.presentation import format_bytes
    from medflare.flare.jobs.building import build_job, size_of

    hyper, task = hyper_and_task(options, chosen_method(options))
    folder = build_job(
        options.method,
        task,
        rounds=options.rounds,
        hyper=hyper,
        out=options.out,
        byoc=not options.no_byoc,
        embed_code=options.embed_code,
        **({} if options.track is None else {"track": options.track}),
        **run_arguments(options),
    )
    if options.model is not None:
        sent = task.network["weights"]
        print(f"the server reads {sent['file']} of {options.model} (sha256 {sent['sha256'][:16]}...): name it in its local/medflare.json")
    place = shlex.quote(str(folder))
    trial = f"nvflare simulator {place} -n 4 -t 4 -w workspace"
    if not task.embedded:
        trial = f"MEDFLARE_DATA_ROOT=DATA nvflare simulator {place} -c SITE,SITE -t 2 -w workspace    (DATA has a folder per site)"
    print(f"job folder: {folder} ({format_bytes(size_of(folder))})\ntry it with: {trial}")
    return 0
