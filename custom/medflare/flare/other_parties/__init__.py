"""Changes to FLARE 2.9's internals that bound what other parties can do: see docs/flare.md."""

from medflare.flare.other_parties.jobs import (
    audit_line_by_line,
    authorize_before_deployment,
    schedule_each_job_alone,
    start_jobs_without_refusing_sites,
    survive_messages,
)
from medflare.flare.other_parties.limits import (
    bound_arrays,
    bound_files,
    bound_messages,
    bound_metadata,
    bound_streams,
)
from medflare.flare.other_parties.senders import (
    connect_nowhere_else,
    keep_consoles_apart,
    obey_the_server_alone,
    refuse_commands_of_sites,
    refuse_logs,
    refuse_relayed_messages,
)


def protect_from_other_parties() -> None:
    """Have FLARE bound what other parties can do to this process, which is a party's or a job's."""
    connect_nowhere_else()
    refuse_relayed_messages()
    refuse_commands_of_sites()
    refuse_logs()
    keep_consoles_apart()
    obey_the_server_alone()
    authorize_before_deployment()
    start_jobs_without_refusing_sites()
    audit_line_by_line()
    survive_messages()
    schedule_each_job_alone()
    bound_messages()
    bound_streams()
    bound_arrays()
    bound_files()
    bound_metadata()
