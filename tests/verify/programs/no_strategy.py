"""A program that trains a Model on one device, without a strategy."""

import torch

import lockstep as ls

network = torch.nn.Linear(2, 1)
model = ls.Model(network)
model.compile(optimizer=torch.optim.SGD(network.parameters(), 0.1), loss=torch.nn.MSELoss(reduction="none"))
model.fit([(torch.ones(4, 2), torch.ones(4, 1))], epochs=100_000, verbose=0)
