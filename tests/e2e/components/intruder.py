"""A person's own program: it asks a hospital's site by FLARE's channel of administration, and would be a site itself: KIT USER SITE."""

import sys
from contextlib import suppress
from pathlib import Path

from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.flare_api.flare_api import new_secure_session
from nvflare.private.admin_defs import Message
from nvflare.private.defs import (
    CellChannel,
    CellChannelTopic,
    CellMessageHeaderKeys,
    ClientType,
    RequestHeader,
    new_cell_message,
)
from nvflare.private.fed.authenticator import Authenticator

kit, user, site = sys.argv[1:]
session = new_secure_session(user, kit, timeout=30)
cell = session.api.cell

message = Message(topic="train.delete_run", body="")
message.set_header(RequestHeader.JOB_ID, "local")
cell.send_request(
    channel=CellChannel.CLIENT_MAIN,
    target=site,
    topic=message.topic,
    request=new_cell_message({}, message),
    timeout=4.0,
)

startup = Path(kit, "startup")
site_of_person = Authenticator(
    cell,
    project_name="medflare",
    client_name=user,
    client_type=ClientType.REGULAR,
    expected_sp_identity="localhost",
    secure_mode=True,
    root_cert_file=str(startup / "rootCA.pem"),
    private_key_file=str(startup / "client.key"),
    cert_file=str(startup / "client.crt"),
    msg_timeout=4.0,
    retry_interval=1.0,
)
with suppress(FLCommunicationError):
    site_of_person.authenticate(FLContext(), Signal())
cell.send_request(
    channel=CellChannel.SERVER_MAIN,
    target="server",
    topic=CellChannelTopic.HEART_BEAT,
    request=new_cell_message({CellMessageHeaderKeys.PROJECT_NAME: "medflare"}, Shareable()),
    timeout=4.0,
)
session.close()
