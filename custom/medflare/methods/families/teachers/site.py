"""What the methods of this package share: the server learns how much each site annotated."""

from medflare.methods import FedAvgSite, Message, MetaSpec, count, extends
from medflare.methods.fedavg.site import F

ANNOTATED = MetaSpec[int]("annotated", "structures or classes that the site annotated", count())


class TeacherSite(FedAvgSite[F]):
    """FedAvg's site algorithm; its replies say how many structures the site annotated."""

    freezes = False

    @extends(meta=(ANNOTATED,))
    def train(self, round: int, incoming: Message) -> Message:
        reply = super().train(round, incoming)
        reply[ANNOTATED] = len(self.site.annotation.names)
        return reply
