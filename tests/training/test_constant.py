import pytest

from helpers.picture_sites import grades, masks
from helpers.small_tasks import small_task
from medflare.data.loading import SiteData
from medflare.training.constant import constant_value
from medflare.training.site import Site


@pytest.mark.parametrize(
    ("metric", "expected"),
    # The majority is class 0, which two of four test images are: F1 of it is 2 * 2 / (2 * 2 + 2) = 2/3, of the two others 0.
    [("accuracy", 1 / 2), ("balanced_accuracy", 1 / 3), ("f1_macro", 2 / 9), ("auc_macro", 1 / 2)],
)
def test_the_majority_of_the_training_images_by_every_metric(metric: str, expected: float) -> None:
    site = Site(
        "A",
        small_task("classification", metric=metric),
        SiteData(grades(0, 0, 1), grades(2), grades(0, 0, 1, 2)),
    )
    assert constant_value(site) == pytest.approx(expected)


def test_a_site_that_never_trains_takes_the_best_in_hindsight() -> None:
    site = Site("X", small_task("classification"), SiteData(grades(), grades(), grades(1, 1, 1, 2)))
    assert constant_value(site) == pytest.approx(3 / 4)
    assert constant_value(
        Site("X", small_task(), SiteData(masks(0, 0), masks(0, 0), masks(8, 2)))
    ) == pytest.approx(2 / 3)


def test_under_differential_privacy_it_does_not_depend_on_the_training_images() -> None:
    for training in (masks(8, 3), masks(1, 0)):
        site = Site("A", small_task(), SiteData(training, masks(8, 2), masks(8, 2)))
        assert constant_value(site, of_training=False) == pytest.approx(2 / 3)


def test_masks_where_they_always_are() -> None:
    assert (
        constant_value(Site("A", small_task(), SiteData(masks(8, 3), masks(8, 2), masks(8, 2))))
        == 1.0
    )


def test_no_test_images() -> None:
    assert (
        constant_value(
            Site("A", small_task("classification"), SiteData(grades(0, 1), grades(1), grades()))
        )
        is None
    )
