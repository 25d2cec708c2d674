"""The questions of `schemas/triage.json` as a Pydantic model.

Show them with: weighbridge schema show weighbridge.examples.ticket_model:Ticket
Ask them with: weighbridge score tickets.jsonl --schema weighbridge.examples.ticket_model:Ticket

In Python, `ParallelScorer.score(text, Ticket).as_model(Ticket)` asks them and gives a ticket.
"""

from typing import Literal

from pydantic import BaseModel, Field

Topic = Literal["outage", "login", "billing", "delivery", "security", "feature request"]


class Ticket(BaseModel):
    """What a message is about, how it feels, and how soon somebody must act."""

    topic: Topic = Field(
        description="What the message is about.",
        json_schema_extra={
            "choice_descriptions": {
                "outage": "servers and services that are down, failing or back again",
                "login": "passwords, accounts and signing in",
                "billing": "invoices, payments, charges and refunds",
                "delivery": "parcels, couriers and shipped goods",
                "security": "attacks, theft, phishing and weaknesses",
                "feature request": "a wish for something new in the product",
            }
        },
    )
    sentiment: Literal["positive", "negative"] = Field(description="The feeling of the text.")
    urgency: bool = Field(
        description="How soon somebody must act. It is urgent when somebody must act this very "
        "night. It is relaxed when it can wait or needs no action.",
        json_schema_extra={"labels": {"true": "urgent", "false": "relaxed"}},
    )
