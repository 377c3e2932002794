"""Reads recipes/*/card.yaml: who ran which recipe on what, with which versions, and what came out."""

import datetime
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["Card", "Entry", "read_card"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)


class Entry(_Strict):
    """One recipe on one kind of hardware.

    Attributes:
        recipe: name of the script beside the card.
        hardware: what it ran, or is meant to run, on.
        status: `verified` when somebody ran exactly `command` there and got `result`.
        command: from the repository's root.
        expected: what a run should show.
        date, versions, result: of the run; none of them where nobody ran it.
    """

    recipe: str = Field(pattern=r"^[a-z0-9_]+\.(sh|py)$")
    hardware: str = Field(min_length=3)
    status: Literal["verified", "not verified"]
    command: str = Field(min_length=3)
    expected: str = Field(min_length=3)
    date: datetime.date | None = None
    versions: dict[str, str] | None = None
    result: str | None = None

    @model_validator(mode="after")
    def _evidence_goes_with_the_status(self) -> Self:
        evidence = {"date": self.date, "versions": self.versions, "result": self.result}
        missing = [name for name, value in evidence.items() if not value]
        if self.status == "verified" and missing:
            raise ValueError(f"a verified entry without {', '.join(missing)}")
        if self.status == "not verified" and len(missing) < len(evidence):
            raise ValueError("an entry that is not verified has no date, versions or result")
        if self.recipe not in self.command and self.status == "not verified":
            raise ValueError(f"the command does not run {self.recipe}")
        return self


class Card(_Strict):
    """All entries of a folder of recipes."""

    entries: tuple[Entry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_entry_for_a_recipe_and_its_hardware(self) -> Self:
        keys = [(entry.recipe, entry.hardware) for entry in self.entries]
        if len(set(keys)) < len(keys):
            raise ValueError("two entries for one recipe and one kind of hardware")
        return self


def read_card(path: Path) -> Card:
    """Read and check one card.

    Raises:
        pydantic.ValidationError: it does not have this form.
    """
    return Card.model_validate(yaml.safe_load(path.read_text()))
