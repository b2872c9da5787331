"""A person's own program, which asks a hospital's site by FLARE's channel of administration: KIT USER SITE."""

import sys

from nvflare.fuel.flare_api.flare_api import new_secure_session
from nvflare.private.admin_defs import Message
from nvflare.private.defs import CellChannel, RequestHeader, new_cell_message

kit, user, site = sys.argv[1:]
session = new_secure_session(user, kit, timeout=30)
message = Message(topic="train.delete_run", body="")
message.set_header(RequestHeader.JOB_ID, "local")
session.api.cell.send_request(
    channel=CellChannel.CLIENT_MAIN,
    target=site,
    topic=message.topic,
    request=new_cell_message({}, message),
    timeout=4.0,
)
session.close()
