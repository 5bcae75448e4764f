"""The optimiser, with float32 masters of weights that are kept in a shorter type."""
import torch


class MasterAdamW(torch.optim.AdamW):
    """AdamW that steps on float32 masters of the parameters that are kept in a shorter type, and rounds these from them: a step
    of 1e-6 on a weight of 0.02 is below half of what bfloat16 tells apart, 6e-5, and would be lost every time (Micikevicius et
    al. 2018, section 3.1). Float32 parameters are their own masters. `trained`: the parameters themselves."""

    def __init__(self, parameters, **options):
        self.trained = list(parameters)
        super().__init__([parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()
                          for parameter in self.trained], **options)

    def rounded(self) -> list:
        """(parameter, master) where they differ."""
        return [(parameter, master) for parameter, master in zip(self.trained, self.param_groups[0]["params"])
                if parameter is not master]

    @torch.no_grad()
    def step(self):
        super().step()  # of parameters that are their own masters: no other master has a gradient
        super().zero_grad()
        for parameter, master in self.rounded():  # one after the other: no second set of gradients
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
                super().step()
                master.grad = None
                parameter.copy_(master)
                self.state[master]["master"] = master  # so that it goes into checkpoints

    def zero_grad(self):
        super().zero_grad()
        for parameter, _ in self.rounded():
            parameter.grad = None

    @torch.no_grad()
    def load_state_dict(self, state: dict):
        """After the parameters were filled; a master that `state` lacks begins as its parameter."""
        super().load_state_dict(state)
        for parameter, master in self.rounded():
            master.copy_(self.state[master].get("master", parameter) if master in self.state else parameter)
            if master in self.state:
                self.state[master]["master"] = master
