"""Cases: convolutions of all dimensions, groups, padding modes and memory formats."""

import torch
import torch.nn.functional as F
from torch import nn

from samplewise.testing.case import Net, noise, weight
from zoo.register import case


@case
def conv1d(B):
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.Tanh(), nn.Conv1d(8, 3, 3, padding=1)), noise(B, 3, 9)


@case
def conv3d(B):
    return nn.Sequential(nn.Conv3d(3, 4, 2), nn.Tanh(), nn.Conv3d(4, 3, 2, bias=False)), noise(B, 3, 4, 5, 3)


@case
def depthwise_with_multiplier(B):
    return nn.Sequential(nn.Conv1d(3, 6, 3, groups=3, bias=False), nn.Tanh()), noise(B, 3, 9)


@case
def conv2d_dilated_and_strided_unevenly(B):
    return nn.Conv2d(3, 4, (3, 2), stride=(2, 3), padding=(2, 1), dilation=(1, 2)), noise(B, 3, 8, 7)


@case
def conv2d_circular_padding(B):
    return nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), noise(B, 3, 6, 5)


@case
def conv1d_reflect_padding(B):
    return nn.Conv1d(3, 4, 3, padding=2, padding_mode="reflect"), noise(B, 3, 9)


@case
def conv2d_same_padding_with_dilation(B):
    return nn.Conv2d(3, 4, (5, 3), padding="same", dilation=(1, 2)), noise(B, 3, 6, 5)


@case
def conv_transpose_1d_with_groups(B):
    return nn.Sequential(nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), nn.Tanh()), noise(B, 4, 5)


@case
def conv_transpose_3d(B):
    return nn.ConvTranspose3d(3, 2, 2), noise(B, 3, 3, 2, 4)


@case
def conv1d_on_batch_second_data(B):
    """The data is transposed to (T, B, C) and back."""
    return Net(lambda m, x: m.f(x.transpose(0, 1).contiguous().permute(1, 2, 0)), f=nn.Conv1d(3, 4, 3)), noise(B, 9, 3)


@case
def conv2d_on_patches_of_each_sample(B):
    """(B·patches, C, h, w): the batch size of the kernel is not the number of losses."""

    def forward(m, x):
        patches = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        return m.f(patches).reshape(len(x), -1)

    return Net(forward, f=nn.Conv2d(3, 4, 3)), noise(B, 3, 8, 8)


@case
def conv_of_an_unbatched_image_per_sample(B):
    return Net(lambda m, x: torch.stack([m.f(image) for image in x]), f=nn.Conv2d(3, 4, 3)), noise(B, 3, 6, 5)


@case
def conv_used_at_two_scales(B):
    def forward(m, x):
        return torch.cat([m.f(x).flatten(1), m.f(F.avg_pool2d(x, 2)).flatten(1)], 1)

    return Net(forward, f=nn.Conv2d(3, 4, 3, padding=1)), noise(B, 3, 6, 6)


@case
def conv_as_unfold_and_fold(B):
    def forward(m, x):
        columns = F.unfold(x, 3, padding=1)
        return F.fold(torch.tanh(m.w @ columns), (6, 5), 3, padding=1)

    return Net(forward, w=weight(18, 27)), noise(B, 3, 6, 5)


@case
def per_sample_kernels_by_grouped_convolution(B):
    """Dynamic filters: B samples folded into the channels of one grouped convolution."""

    def forward(m, x):
        kernels = m.make(x.mean((2, 3))).reshape(len(x) * 4, 3, 3, 3)
        return F.conv2d(x.reshape(1, -1, *x.shape[2:]), kernels, groups=len(x)).reshape(len(x), -1)

    return Net(forward, make=nn.Linear(3, 108)), noise(B, 3, 6, 5)


@case
def pixel_shuffle_and_interpolate(B):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.PixelShuffle(2), nn.Upsample(scale_factor=1.5, mode="bilinear"), nn.Conv2d(2, 3, 3)
    )
    return model, noise(B, 3, 6, 5)


@case
def unet(B):
    def forward(m, x):
        top = torch.relu(m.enter(x))
        low = torch.relu(m.low(F.max_pool2d(top, 2)))
        return m.out(torch.cat([top, m.up(low)], 1))

    parts = dict(
        enter=nn.Conv2d(3, 4, 3, padding=1), low=nn.Conv2d(4, 6, 3, padding=1), up=nn.ConvTranspose2d(6, 4, 2, stride=2)
    )
    return Net(forward, **parts, out=nn.Conv2d(8, 3, 1)), noise(B, 3, 6, 4)


@case
def patch_embedding_with_cls_token(B):
    def forward(m, x):
        h = m.patches(x).flatten(2).mT
        h = torch.cat([m.cls.expand(len(x), -1, -1), h], 1) + m.places
        return m.head(m.norm(h).mean(1))

    model = Net(
        forward,
        patches=nn.Conv2d(3, 6, 2, stride=2),
        cls=weight(1, 1, 6),
        places=weight(1, 7, 6),
        norm=nn.LayerNorm(6),
        head=nn.Linear(6, 3),
    )
    return model, noise(B, 3, 6, 4)


@case
def deformed_sampling_grid(B):
    """A spatial transformer."""

    def forward(m, x):
        theta = 0.1 * m.where(x.flatten(1)).reshape(-1, 2, 3) + torch.eye(2, 3, dtype=x.dtype, device=x.device)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return m.f(F.grid_sample(x, grid, align_corners=False))

    return Net(forward, where=nn.Linear(90, 6), f=nn.Conv2d(3, 4, 3)), noise(B, 3, 6, 5)
