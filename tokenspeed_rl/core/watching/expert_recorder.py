"""Between the steps and the record of expert distribution: who counts, and only while somebody wants it."""

from tokenspeed_rl.core.batch import StepPlan
from tokenspeed_rl.core.model_runner import ModelRunner, StepOutcome
from tokenspeed_rl.lifecycle.expert_distribution import ExpertDistribution


class ExpertRecorder:
    """A `StepObserver` that has the runner count while recording is on."""

    def __init__(self, record: ExpertDistribution, runner: ModelRunner) -> None:
        self._record = record
        self._runner = runner

    def begins(self, plan: StepPlan) -> None:
        self._runner.counts_experts = self._record.recording

    def ended(self, plan: StepPlan, outcome: StepOutcome) -> None:
        if outcome.expert_counts is not None:
            self._record.add(plan.num_tokens, outcome.expert_counts)
