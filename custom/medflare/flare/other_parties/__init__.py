"""Changes to FLARE 2.9's internals that bound what other parties can do: see docs/flare.md."""

from medflare.flare.other_parties import connections, jobs, limits, senders


def protect_from_other_parties() -> None:
    """Have FLARE bound what other parties can do to this process, which is a party's or a job's."""
    senders.connect_nowhere_else()
    senders.refuse_relayed_messages()
    senders.refuse_commands_of_sites()
    senders.refuse_logs()
    senders.keep_consoles_apart()
    senders.obey_the_server_alone()
    jobs.authorize_before_deployment()
    jobs.start_jobs_without_refusing_sites()
    jobs.audit_line_by_line()
    jobs.survive_messages()
    jobs.schedule_each_job_alone()
    jobs.archive_whole_jobs()
    connections.bound_handshakes()
    connections.bound_connections()
    connections.bound_waiting_frames()
    limits.bound_messages()
    limits.bound_streams()
    limits.bound_arrays()
    limits.bound_files()
    limits.bound_metadata()
