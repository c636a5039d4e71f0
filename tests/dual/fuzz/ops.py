"""The ops that random programs draw from: one line of Python each, with fields to fill.

Fields are drawn by `programs.Draw` in the order in which they stand:

    {x} {y}    live values; of at least `dims` dimensions for {x}
    {s}        a live value of x's shape
    {o}        an operand that broadcasts to x's shape: a value, a weight, a constant, a number
    {d} {e}    a dimension of x, and another one
    {k}        a number away from 0; {n} a small integer as Python or NumPy has it
    {rows}     an index tensor along dimension {d}; {mask} a boolean tensor of x's shape
    {sub}      any index of x: integers, slices, masks, index tensors, Ellipsis, None
    {r}        an operand that broadcasts to x[sub]
    {shape}    a shape with as many elements as x
    {big}      a shape to which x can be expanded
    {all}      all element numbers of x, shuffled; {size} how many
    {ramp}     distinct numbers of x's shape, which keep norms and deviations away from 0
    {square}   a matrix that can be inverted, {diagonal} a mask, {image} x in channels_last,
    {heads}    x as queries or keys
    {W} {b}    a weight [width, width] and [width], where width is x's last size
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """One op: `name` is what reports call it, `text` an expression or, in place, a statement."""

    name: str
    text: str
    dims: int = 0
    dtype: str = "float"
    in_place: bool = False


def _table(text: str, dims: int = 0, dtype: str = "float", in_place: bool = False) -> list[Op]:
    ops = []
    for line in text.strip().splitlines():
        name, _, body = line.strip().partition(": ")
        ops.append(Op(name, body, dims, dtype, in_place))
    return ops


ARITHMETIC = _table("""
add: {x} + {o}
sub: {x} - {o}
mul: {x} * {o}
radd: {o} + {x}
rsub: {k} - {x}
rmul: {o} * {x}
div: {x} / {k}
divide by a tensor: {x} / ({s}.square() + 1)
rdiv: {k} / ({x}.square() + 1)
pow: {x} ** 2
pow of a tensor: ({x}.square() + 0.5) ** {s}.tanh()
rpow: 1.5 ** {x}.tanh()
neg: -{x}
add with alpha: torch.add({x}, {s}, alpha={k})
numpy number: {x} * np.float64({k})
0-d tensor: {x} * torch.tensor({k})
addcmul: torch.addcmul({x}, {s}, {s}, value={k})
addcdiv: torch.addcdiv({x}, {s}, {s}.square() + 1)
lerp: torch.lerp({x}, {s}, {k})
remainder: torch.remainder({x}, 1.7)
fmod: torch.fmod({x}, 1.7)
maximum: torch.maximum({x}, {s} * 0.9)
minimum: torch.minimum({x}, {s} * 1.1)
clamp: {x}.clamp(-0.8, 0.8)
clamp by a tensor: torch.clamp({x}, max={s}.abs() + 0.3)
where: torch.where({mask}, {x}, {o})
where of numbers: torch.where({mask}, {x}, 0.5)
masked_fill: {x}.masked_fill({mask}, {k})
atan2: torch.atan2({x}, {s}.square() + 0.5)
hypot: torch.hypot({x}, {s} + 0.1)
logaddexp: torch.logaddexp({x}, {s})
logaddexp2: torch.logaddexp2({x}, {s})
xlogy: torch.xlogy({x}, {s}.square() + 0.5)
copysign: torch.copysign({x}, {s})
dist: torch.dist({x}, {s} + 0.7)
""")

POINTWISE = _table("""
sin: {x}.sin()
cos: torch.cos({x})
tan: torch.tan({x} * 0.3)
asin: torch.asin({x}.tanh() * 0.9)
acos: torch.acos({x}.tanh() * 0.9)
atan: torch.atan({x})
sinh: torch.sinh({x}.tanh())
cosh: torch.cosh({x}.tanh())
asinh: torch.asinh({x})
exp: {x}.clamp(max=2.1).exp()
exp2: torch.exp2({x}.tanh())
expm1: torch.expm1({x}.tanh())
log: ({x}.square() + 0.5).log()
log1p: torch.log1p({x}.square())
log2: torch.log2({x}.square() + 0.5)
sqrt: ({x}.square() + 0.5).sqrt()
rsqrt: torch.rsqrt({x}.square() + 0.5)
reciprocal: ({x}.square() + 0.5).reciprocal()
square: {x}.square()
abs: ({x} + 0.01).abs()
sign: {x} * {s}.sign()
floor: {x} * {s}.floor()
round: {x} + {s}.round()
erf: torch.erf({x})
erfc: torch.erfc({x})
lgamma: torch.lgamma({x}.square() + 0.5)
digamma: torch.digamma({x}.square() + 0.5)
sinc: torch.sinc({x} + 0.05)
i0: torch.special.i0({x})
logit: torch.logit({x}.sigmoid() * 0.8 + 0.1)
deg2rad: torch.deg2rad({x})
nan_to_num: torch.nan_to_num({x})
sigmoid: torch.sigmoid({x})
tanh: {x}.tanh()
relu: F.relu({x})
silu: F.silu({x})
gelu: F.gelu({x})
gelu tanh: F.gelu({x}, approximate="tanh")
softplus: F.softplus({x})
elu: F.elu({x} + 0.01)
celu: F.celu({x} + 0.01, 0.7)
selu: F.selu({x} + 0.01)
leaky_relu: F.leaky_relu({x}, 0.1)
mish: F.mish({x})
hardtanh: F.hardtanh({x})
hardswish: F.hardswish({x})
relu6: F.relu6({x} * 3)
logsigmoid: F.logsigmoid({x})
softsign: F.softsign({x})
tanhshrink: F.tanhshrink({x})
threshold: F.threshold({x}, 0.1, 0.2)
dropout p=0: F.dropout({x}, 0.0)
dropout off: F.dropout({x}, 0.5, training=False)
dropout1d p=0: nn.Dropout(0.0)({x})
identity module: nn.Identity()({x})
silu module: nn.SiLU()({x})
""")

REDUCTIONS = _table(
    """
sum: {x}.sum()
sum dim: {x}.sum({d})
sum keepdim: {x}.sum({d}, keepdim=True)
sum all dims: {x}.sum(({d}, {e}))
mean: {x}.mean()
mean dim: {x}.mean({d})
mean keepdim: {x}.mean({d}, keepdim=True)
amax: {x}.amax({d})
amin: {x}.amin({d}, keepdim=True)
max: {x}.max()
max dim: {x}.max({d})
max dim keepdim: torch.max({x}, {d}, keepdim=True)
min dim: {x}.min({d}).values
median: {x}.contiguous().median({d}).values
kthvalue: {x}.kthvalue(1, {d}).values
prod: {x}.prod({d})
var: {x}.var({d}, unbiased=False)
std: ({x} * {ramp}).std({d}, unbiased=False)
std keepdim: ({x} + {ramp}).std({d}, keepdim=True, correction=0)
var_mean: torch.var_mean({x}, {d}, correction=0)
norm: ({x} + 0.3).norm()
norm dim: ({x} + {ramp}).norm(dim={d}, keepdim=True)
vector_norm: torch.linalg.vector_norm({x} + {ramp}, dim={d})
vector_norm 3: torch.linalg.vector_norm({x} + {ramp}, 3, dim={d})
logsumexp: {x}.logsumexp({d})
logsumexp keepdim: torch.logsumexp({x}, {d}, keepdim=True)
cumsum: {x}.cumsum({d})
cumprod: {x}.cumprod({d})
cummax: {x}.cummax({d})
cummin: torch.cummin({x}, {d})
logcumsumexp: {x}.logcumsumexp({d})
diff: {x}.diff(dim={d}, prepend={x})
trapezoid: torch.trapezoid({x}, dim={d})
nansum: {x}.nansum({d})
aminmax: torch.aminmax({x}, dim={d})
softmax: {x}.softmax({d})
log_softmax: F.log_softmax({x}, {d})
softmin: F.softmin({x}, {d})
softmax dtype: F.softmax({x}, dim={d}, dtype=torch.float64)
normalize: F.normalize({x} + {ramp}, dim={d})
renorm: {x}.renorm(2, {d}, 0.7)
sort: {x}.sort({d})
sort descending: torch.sort({x}, dim={d}, descending=True)
topk: {x}.topk(1, {d})
argsort: {x}.gather({d}, {x}.argsort({d}))
quantile: {x}.quantile(0.4, {d})
glu: F.glu(torch.cat([{x}, {s}], {d}), {d})
""",
    dims=1,
)

INDEXING = _table(
    """
index: {x}[{sub}]
index twice: {x}[{sub}] * {x}[{sub}]
index_select: {x}.index_select({d}, {rows})
take: {x}.take(torch.tensor([0, -1, 0]))
take_along_dim: torch.take_along_dim({x}, {x}.argsort({d}), {d})
masked_select: {x}.masked_select({mask})
gather: {x}.gather({d}, {x}.argsort({d}).narrow({d}, 0, 1))
scatter: {x}.scatter({d}, {s}.argsort({d}), {s})
scatter number: {x}.scatter({d}, {s}.argsort({d}).narrow({d}, 0, 1), {k})
scatter_add: {x}.scatter_add({d}, {s}.argsort({d}), {s})
index_add: {x}.index_add({d}, {rows}, {x}.index_select({d}, {rows}).sin())
index_copy: {x}.index_copy({d}, {row}, {s}.index_select({d}, {row}) * 2)
index_fill: {x}.index_fill({d}, {row}, {k})
index_put: {x}.index_put(({row0},), {s}[{row0}].cos())
masked_scatter: {x}.masked_scatter({mask}, {s}.sin())
select_scatter: {x}.select_scatter({s}.select({d}, 0) * 2, {d}, -1)
slice_scatter: {x}.slice_scatter({s}.narrow({d}, 0, 1) * 2, {d}, 0, 1)
roll: {x}.roll(1, {d})
flip: {x}.flip({d})
cat: torch.cat([{x}, {s}], {d})
cat with itself: torch.cat(({x}, {x}), dim={d})
stack: torch.stack([{x}, {s}], {d})
hstack: torch.hstack([{x}, {s}])
vstack: torch.vstack([{x}, {s}])
repeat: {x}.repeat({ones}2)
repeat_interleave: {x}.repeat_interleave(2, {d})
tile: torch.tile({x}, (2,))
pad: F.pad({x}, (1, 1))
pad with a number: F.pad({x}, (0, 1), value=0.5)
tril: torch.atleast_2d({x}).tril()
triu: torch.atleast_2d({x}).triu(1)
diag_embed: {x}.diag_embed()
one of a list: [{x}, {s}][1] * 1.0
""",
    dims=1,
)

VIEWS = [
    *_table("""
view: {x}.view({shape})
view -1: {x}.view(-1)
view_as: {x}.view_as({s})
reshape: {x}.reshape({shape})
reshape -1: {x}.reshape(-1)
flatten: {x}.flatten()
ravel: {x}.ravel()
unsqueeze: {x}.unsqueeze(0)
unsqueeze last: {x}.unsqueeze(-1)
squeeze: {x}.squeeze()
expand: {x}.expand({big})
broadcast_to: torch.broadcast_to({x}, ({big}))
expand_as: {x}[None].expand_as(torch.stack([{x}, {x}]))
broadcast_tensors: torch.broadcast_tensors({x}, {s}[None])
T: {x}.t() if {x}.dim() < 3 else {x}.transpose(0, 1)
clone: {x}.clone()
contiguous: {x}.contiguous()
to: {x}.to({s}.dtype)
to dtype: {x}.to(torch.float64)
to copy: {x}.to(torch.float64, copy=True)
to device: {x}.to("cpu")
to other: {x}.to({s})
double: {x}.double()
type_as: {x}.type_as({s})
empty_like copy: torch.empty_like({x}).copy_({x})
alias: {x}
atleast_2d: torch.atleast_2d({x})
real: {x}.real
"""),
    *_table(
        """
transpose: {x}.transpose({d}, {e})
swapaxes: torch.swapaxes({x}, {d}, {e})
movedim: {x}.movedim({d}, {e})
permute: {x}.permute({perm})
chunk: {x}.chunk(2, {d})
split: {x}.split(1, {d})
split sizes: torch.split({x}, [1, {x}.size({d}) - 1], {d})
tensor_split: {x}.tensor_split(2, {d})
unbind: {x}.unbind({d})
iterate: [row for row in {x}][0]
unpack: list({x})[-1]
narrow: {x}.narrow({d}, 0, 1)
select: {x}.select({d}, -1)
unfold: {x}.unfold({d}, 1, 1)
unfold windows: {x}.unfold({d}, 2, 1)
first row: {x}[0]
last row: {x}[-1]
slice: {x}[..., 1:]
step: {x}[..., ::2]
None: {x}[:, None]
rows: {x}[:1]
unflatten: {x}.unflatten(-1, (-1, 1))
squeeze dim: {x}[:1].squeeze(0)
meshgrid: torch.meshgrid({x}.reshape(-1)[:2], {s}.reshape(-1)[:3], indexing="ij")
""",
        dims=1,
    ),
    *_table(
        """
mT: {x}.mT
mH: {x}.mH
diagonal: {x}.diagonal()
diagonal offset: {x}.diagonal(-1, {d}, {e})
hsplit: {x}.hsplit([1])
vsplit: {x}.vsplit([1])
flatten dims: {x}.flatten(0, 1)
flatten last: {x}.flatten(-2)
swap and join: {x}.transpose(0, 1).reshape({x}.shape)
activation of a transpose: F.silu({x}.transpose({d}, {e})).contiguous()
tanh of a transpose: {x}.transpose({d}, {e}).tanh().flatten()
sum with a transpose: ({x}.transpose(0, 1) * 2).contiguous()
rot90: {x}.rot90(1, ({d}, {e}))
contiguous of a transpose: {x}.transpose({d}, {e}).contiguous()
clone of a transpose: {x}.transpose({d}, {e}).clone()
softmax of a transpose: {x}.transpose({d}, {e}).softmax(-1).contiguous()
""",
        dims=2,
    ),
]

LINEAR = [
    *_table(
        """
linear: F.linear({x}, {W}, {b})
linear without bias: F.linear({x}, {W})
matmul by a weight: {x} @ {W}
rmatmul: {W}.T @ {x}.unsqueeze(-1)
scale by a weight: {x} * {b}
einsum: torch.einsum("...i,ij->...j", {x}, {W})
einsum of two: torch.einsum("...i,...j->...ij", {x}, {s})
outer: torch.outer({x}.reshape(-1)[:3], {s}.reshape(-1)[:2])
inner: torch.inner({x}, {s})
tensordot: torch.tensordot({x}, {W}, dims=1)
layer_norm: F.layer_norm({x} * {ramp}, ({width},), {b}, None)
layer_norm plain: F.layer_norm({x} + {ramp}, ({width},))
rms_norm: F.rms_norm({x}, ({width},), {b}, 1e-6)
embedding: F.embedding(torch.tensor([0, 1, 1]), torch.atleast_2d({x}).flatten(0, -2).repeat(2, 1))
cosine_similarity: F.cosine_similarity({x} + {ramp}, {s} + {ramp}, dim=-1)
mse_loss: F.mse_loss({x}, {s}.sin())
cross_entropy: F.cross_entropy(torch.atleast_2d({x}).flatten(0, -2)[:1], torch.tensor([0]))
kron: torch.kron({x}.reshape(-1)[:2], {s}.reshape(-1)[:2])
cross: torch.linalg.cross(torch.cat([{x}] * 3, -1)[..., :3], torch.cat([{s}] * 3, -1)[..., 1:4])
rotate half: torch.cat((-{x}[..., 1:], {x}[..., :1]), -1)
swiglu: F.silu({x} @ {W}) * ({x} @ {W})
addmv: torch.addmv({b}, {W}, {x}.reshape(-1, {width})[0])
rfft: torch.fft.rfft({x})
polar: torch.polar({s}.square() + 0.1, {x})
""",
        dims=1,
    ),
    *_table(
        """
matmul of two: {x} @ {s}.mT
matmul: torch.matmul({x}, {x}.transpose(-1, -2))
bmm: torch.bmm({x}.reshape(1, -1, {width}), {s}.reshape(1, -1, {width}).mT)
baddbmm: torch.baddbmm({b}, {x}.reshape(1, -1, {width}), {W}[None], beta=0.5, alpha={k})
addmm: torch.addmm({b}, {x}.reshape(-1, {width}), {W})
mm: torch.mm({x}.flatten(0, -2), {W})
conv1d: F.conv1d({x}.reshape(1, -1, {width}).mT, {W}[..., None], {b})
conv1d padded: F.conv1d({x}.reshape(1, 1, -1), {W}[:2, None, :2], padding=1)
avg_pool1d: F.avg_pool1d({x}.reshape(1, 1, -1), 2)
max_pool1d: F.max_pool1d({x}.reshape(1, 1, -1), 2)
adaptive_avg_pool1d: F.adaptive_avg_pool1d({x}.reshape(1, 1, -1), 2)
interpolate: F.interpolate({x}.reshape(1, 1, -1), scale_factor=2)
sdpa: F.scaled_dot_product_attention({x}, {s}, {x} * 0.5)
sdpa causal: F.scaled_dot_product_attention({heads}, {heads}, {heads}, is_causal=True)
sdpa masked: F.scaled_dot_product_attention({x}, {x}, {s}, attn_mask={diagonal})
group_norm: F.group_norm({x}.reshape(1, 1, -1) + {ramp}.reshape(1, 1, -1), 1)
group_norm of channels_last: F.group_norm({image}.sin() + ramp({image}), 1)
conv2d of channels_last: F.conv2d({image}, {W}[:1, :2, None, None])
max_pool2d of channels_last: F.max_pool2d({image}, (1, 2))
cdist: torch.cdist({x} + {ramp}, {s} * 2 + 5)
det: torch.det({square})
slogdet: torch.linalg.slogdet({square}).logabsdet
inverse: torch.linalg.inv({square})
solve: torch.linalg.solve({square}, {s})
trace: {x}.flatten(0, -2).trace()
cov: torch.cov({x}.flatten(0, -2), correction=0)
""",
        dims=2,
    ),
]

COMPLEX = [
    *_table(
        """
complex mul: {x} * {x}
complex conj: {x}.conj()
complex mH: torch.atleast_2d({x}).mH
complex abs: ({x} + 3).abs()
complex real: {x}.real
complex imag: {x}.imag
view_as_real: torch.view_as_real({x})
complex scale: {x} * (0.3 + 0.4j)
complex reshape: {x}.reshape(-1)
complex transpose: torch.atleast_2d({x}).transpose(0, 1)
complex exp: torch.exp({x} * 0.1)
ifft: torch.fft.ifft({x}).real
complex index: torch.atleast_1d({x})[0]
complex sum: {x}.sum()
complex angle: ({x} + 9).angle()
""",
        dtype="complex",
    ),
    *_table(
        """
complex mul_: {x}.mul_(0.5 + 0.5j)
view_as_real add_: torch.view_as_real({x}).add_({k})
complex real add_: {x}.real.add_({k})
complex imag mul_: {x}.imag.mul_({k})
""",
        dtype="complex",
        in_place=True,
    ),
    *_table("""
fft: torch.fft.fft(torch.atleast_1d({x}))
complex: torch.complex({x}, {s})
stack as complex: torch.view_as_complex(torch.stack([{x}, {s}], -1))
view_as_complex: torch.view_as_complex({x}.view({pairs}))
"""),
]

FRESH = _table("""
zeros_like copy_: torch.zeros_like({x}).copy_({s})
new_zeros add_: {x}.new_zeros({x}.shape).add_({x})
zeros copy_: torch.zeros({x}.shape, dtype=torch.float64).copy_({x})
empty copy_: torch.empty({x}.shape, dtype=torch.float64).copy_({x})
full_like mul: torch.full_like({x}, {k}) * {x}
ones_like: torch.ones_like({x}) - {x}
new_tensor: {x} * {x}.new_tensor({k})
arange: {x} * torch.arange({x}.numel(), dtype=torch.float64).view({x}.shape).sin()
detach: {x} * held({s}.detach())
detach of a product: held(({x} * {s}).detach()) + {x}.sin()
is_contiguous: {x} * (2.0 if {x}.is_contiguous() else 3.0)
stride: {x} * (1.0 + sum(s for s, n in zip({x}.stride(), {x}.shape) if n > 1) / 10)
storage_offset: {x} * (1.0 + {x}.storage_offset() / 10)
item: {x} * (2.0 if {s}.sum().item() > 0 else 1.0)
zeros index_add_: {x}.new_zeros({shape}).flatten().index_add_(0, {all}, {x}.reshape(-1))
zeros index_copy_: torch.zeros({size}, dtype=torch.float64).index_copy_(0, {all}, {x}.reshape(-1))
zeros scatter_add_: {x}.new_zeros({size}).scatter_add_(0, {all}, {x}.reshape(-1))
checkpoint: checkpoint(lambda x: F.silu(x) * x, {x}, use_reentrant=False)
checkpoint with a write: checkpoint(lambda x: F.silu(x).mul_({k}), {x}, use_reentrant=False)
checkpoint of a linear: checkpoint(F.linear, {x}, {W}, {b}, use_reentrant=False)
checkpoint in another: checkpoint(lambda x: twice(x) * x, {x}, use_reentrant=False)
save_on_cpu: on_cpu(lambda x: F.silu(x) * x.sin(), {x})
save_on_cpu with a write: on_cpu(lambda x: x.sin().add_({k}).exp(), {x} * 0.5)
zeros: torch.zeros({shape}, dtype=torch.float64)
zeros_like: torch.zeros_like({x})
new_zeros: {x}.new_zeros({shape})
ones: torch.ones({size}, dtype=torch.float64).view({shape})
full: torch.full(({shape}), {k}, dtype=torch.float64)
empty: torch.empty({x}.shape, dtype=torch.float64).fill_({k})
zeros transposed: torch.zeros({size}, dtype=torch.float64).view(2, -1).t()
of weights: (W[:2, :3] * b[:3]).sin()
times an integer: {x} * {s}.long()
times a boolean: {x} * {s}.round().bool()
index by argsort: {x}[{x}.reshape({x}.shape[0], -1).sum(1).argsort()]
index by argmax: {x}[{x}.reshape({x}.shape[0], -1).sum(1).argmax()]
sum of rows: sum({x}.unbind(0))
stack of a list: torch.stack([row.sin() for row in {x}])
max of numbers: max({x}.reshape(-1)[:2])
zip of rows: torch.stack([a * b for a, b in zip({x}, {s})])
""")

# The same ops as people spell them.
SPELLINGS = [
    *_table("""
add by name: torch.add(input={x}, other={s}, alpha={k})
mul by name: torch.mul(input={x}, other={s})
multiply: torch.multiply({x}, {o})
true_divide: torch.true_divide({x}, {k})
subtract: torch.subtract({x}, {s}, alpha={k})
rsub of torch: torch.rsub({x}, {s})
where by name: torch.where(condition={mask}, input={x}, other={s})
where of a method: {x}.where({mask}, {s})
clamp by name: torch.clamp(input={x}, min=-0.7, max=0.9)
clip: {x}.clip(-0.7, 0.9)
reshape by name: torch.reshape(input={x}, shape=({shape},))
reshape to a list: {x}.reshape([{shape}])
view of a size: {x}.view(torch.Size([{shape}]))
view of numpy sizes: {x}.view(np.int64({size}))
flatten by name: torch.flatten(input={x}, start_dim=0)
expand to a list: {x}.expand([{big}])
silu by name: F.silu(input={x})
pow by name: torch.pow(input={x}, exponent=2)
masked_fill by name: {x}.masked_fill(mask={mask}, value={k})
sub of a number: torch.sub({x}, {k})
index of a list: {x}.reshape(-1)[[0, -1]]
to by name: {x}.to(dtype=torch.float64, device="cpu")
sum of a list: torch.sum(torch.stack([{x}, {s}]), dim=0)
negative: torch.negative({x})
positive: +{x}
matrix of a vector: torch.atleast_2d({x}) @ torch.atleast_2d({x}).mT
floor_divide: {x} + torch.floor_divide({s}.detach(), 2)
bool mask times: ({mask}) * {x}
power of numbers: torch.pow(2.0, {x}.tanh())
"""),
    *_table(
        """
sum by axis: {x}.sum(axis={d})
mean by name: torch.mean(input={x}, dim={d}, keepdim=True)
amax by axis: {x}.amax(axis={d})
sum over a tuple: {x}.sum(dim=(0, -1) if {x}.dim() > 1 else (0,), dtype=torch.float64)
max by name: torch.max(input={x}, dim={d}, keepdim=False)
softmax by name: torch.softmax(input={x}, dim={d})
cat by name: torch.cat(tensors=[{x}, {s}], dim={d})
cat by axis: torch.cat([{x}, {s}], axis={d})
stack by name: torch.stack(tensors=({x}, {s}), dim=0)
concat: torch.concat([{x}, {s}])
permute to a list: {x}.permute([{perm}])
permute by name: torch.permute(input={x}, dims=({perm},))
chunk by name: torch.chunk(input={x}, chunks=2, dim={d})
split by name: torch.split(tensor={x}, split_size_or_sections=1, dim={d})
unbind by name: torch.unbind(input={x}, dim={d})
narrow by name: torch.narrow(input={x}, dim={d}, start=0, length=1)
select of numpy: {x}.select(0, np.int64(0))
gather by name: torch.gather(input={x}, dim={d}, index={x}.argsort({d}))
index_select of one: {x}.index_select({d}, torch.tensor(0))
unsqueeze by name: torch.unsqueeze(input={x}, dim=0)
cumsum by axis: {x}.cumsum(axis={d})
linear by name: F.linear(input={x}, weight={W}, bias={b})
norm by name: torch.linalg.vector_norm(x={x} + {ramp}, ord=2, dim={d})
scatter_reduce: {x}.scatter_reduce({d}, {s}.argsort({d}), {s}, "sum")
scatter_reduce amax: {x}.scatter_reduce({d}, {s}.argsort({d}), {s}, "amax")
index_reduce: {x}.index_reduce({d}, {row}, {s}.index_select({d}, {row}), "prod")
matmul operator: {x}.__matmul__({W})
len: {x} * len({x})
zeros of its size: torch.zeros({x}.size(), dtype={x}.dtype) + {x}
shape unpacked: {x}.new_ones(*{x}.shape) * {x}
full_backward_hook: hooked({x})
lstm: lstm({x}.reshape(1, -1, {width}))
""",
        dims=1,
    ),
    *_table(
        """
transpose by name: torch.transpose(input={x}, dim0={d}, dim1={e})
transpose by keyword: {x}.transpose(dim0={d}, dim1={e})
T: {x}.flatten(0, -2).T
H: {x}.flatten(0, -2).H
adjoint: {x}.adjoint()
swapdims: {x}.swapdims({d}, {e})
movedim of tuples: {x}.movedim((0, 1), (1, 0))
sdpa of masked rows: F.scaled_dot_product_attention({x}, {s}, {x}, attn_mask={diagonal}.tril(-1))
sdpa with a bias: F.scaled_dot_product_attention({x}, {s}, {x}, attn_mask={square})
sdpa by name: F.scaled_dot_product_attention(query={x}, key={x}, value={s}, scale=0.3)
attention written out: (({x} @ {s}.mT) / 2).softmax(-1) @ {x}
grid_sample: F.grid_sample({image}, {square}[..., :2, :2].reshape(1, -1, 1, 2).tanh() * 0.9)
pdist: F.pdist({x}.flatten(0, -2) + ramp({x}.flatten(0, -2)))
""",
        dims=2,
    ),
]

IN_PLACE = [
    *_table(
        """
x += o: {x} += {o}
x -= o: {x} -= {o}
x *= o: {x} *= {o}
x /= k: {x} /= {k}
x **= 2: {x} **= 2
add_: {x}.add_({o})
add_ alpha: {x}.add_({s}, alpha={k})
sub_: {x}.sub_({s})
mul_: {x}.mul_({o})
div_: {x}.div_({s}.square() + 1)
pow_: {x}.pow_(2)
neg_: {x}.neg_()
sin_: {x}.sin_()
exp_: {x}.tanh_().exp_()
tanh_: {x}.tanh_()
sigmoid_: {x}.sigmoid_()
square_: {x}.square_()
reciprocal_: {x}.square_().add_(0.5).reciprocal_()
sqrt_: {x}.square_().add_(0.5).sqrt_()
relu_: {x}.relu_()
clamp_: {x}.clamp_(-0.8, 0.8)
clamp_ min: {x}.clamp_(min=-0.5)
zero_: {x}.zero_()
fill_: {x}.fill_({k})
copy_: {x}.copy_({o})
copy_ of itself: {x}.copy_({x} * 2)
lerp_: {x}.lerp_({s}, {k})
addcmul_: {x}.addcmul_({s}, {s}, value={k})
masked_fill_: {x}.masked_fill_({mask}, {k})
masked_scatter_: {x}.masked_scatter_({mask}, {s}.sin())
x[...] = o: {x}[...] = {o}
rebind: {x} = {x} * {k}
rebind to a view: {x} = {x}.flatten()
out of place and back: {x}.copy_(({x} * {o}).tanh())
mul_ by its sigmoid: {x}.mul_(torch.sigmoid({x}))
add_ of its sine: {x}.add_({x}.sin())
mul_ by itself: {x}.mul_({x})
relu inplace: F.relu({x}, inplace=True)
silu inplace: F.silu({x}, inplace=True)
elu inplace: F.elu({x}, inplace=True)
leaky_relu inplace: F.leaky_relu({x}, 0.1, inplace=True)
hardtanh inplace: F.hardtanh({x}, inplace=True)
ReLU module inplace: nn.ReLU(inplace=True)({x})
SiLU module inplace: nn.SiLU(inplace=True)({x})
dropout inplace: F.dropout({x}, 0.0, inplace=True)
view mul_: {x}.view(-1).mul_({k})
view add_: {x}.view(-1)[:2].add_({k})
reshape add_: {x}.reshape(-1).add_({k})
flatten mul_: {x}.flatten().mul_({k})
contiguous add_: {x}.contiguous().add_({k})
detach add_: {x}.detach().clone().add_({k})
squeeze add_: {x}.squeeze().add_({k})
atan2_: {x}.atan2_({s}.square() + 0.5)
""",
        in_place=True,
    ),
    *_table(
        """
abs_: {x}.abs_()
cos_: {x}.cos_()
tan_: {x}.mul_(0.3).tan_()
atan_: {x}.atan_()
asinh_: {x}.asinh_()
erf_: {x}.erf_()
expm1_: {x}.tanh_().expm1_()
log_: {x}.square_().add_(0.5).log_()
log1p_: {x}.square_().log1p_()
rsqrt_: {x}.square_().add_(0.5).rsqrt_()
sinc_: {x}.add_(0.05).sinc_()
floor_: {x}.floor_()
frac_: {x}.frac_()
sign_: {x}.sign_()
subtract_: {x}.subtract_({s}, alpha={k})
multiply_: {x}.multiply_({o})
true_divide_: {x}.true_divide_({k})
remainder_: {x}.remainder_(1.7)
x %= k: {x} %= 1.7
fmod_: {x}.fmod_(1.7)
hypot_: {x}.hypot_({s} + 0.1)
copysign_: {x}.copysign_({s})
xlogy_: {x}.xlogy_({s}.square() + 0.5)
addcdiv_: {x}.addcdiv_({s}, {s}.square() + 1, value={k})
clip_: {x}.clip_(max=0.8)
clamp_max_: {x}.clamp_max_(0.8)
nan_to_num_: {x}.nan_to_num_()
deg2rad_: {x}.deg2rad_()
float_power_: {x}.float_power_(2)
put_: {x}.put_(torch.tensor([0, -1]), {s}.reshape(-1)[:1].repeat(2))
add_ by name: {x}.add_(other={s}, alpha={k})
masked_fill_ by name: {x}.masked_fill_(mask={mask}, value={k})
clamp_ by name: {x}.clamp_(min=-0.5, max=0.6)
fill_ by name: {x}.fill_(value={k})
fill_ with a tensor: {x}.fill_({s}.sum())
copy_ non_blocking: {x}.copy_({s}, non_blocking=True)
copy_ of a row: {x}.copy_({s}.reshape(-1)[0])
threshold inplace: F.threshold({x}, 0.1, 0.2, inplace=True)
threshold_: F.threshold_({x}, 0.1, 0.2)
relu_ of F: F.relu_({x})
celu inplace: F.celu({x}, 0.7, inplace=True)
selu inplace: F.selu({x}, inplace=True)
mish inplace: F.mish({x}, inplace=True)
hardswish inplace: F.hardswish({x}, inplace=True)
relu6 inplace: F.relu6({x}, inplace=True)
swapped into place: {x}.copy_({x}.flip(0) if {x}.dim() else {x} * 2)
""",
        in_place=True,
    ),
    *_table(
        """
x[sub] = r: {x}[{sub}] = {r}
x[sub] += r: {x}[{sub}] += {r}
x[sub] -= r: {x}[{sub}] -= {r}
x[sub] *= r: {x}[{sub}] *= {r}
x[sub] /= k: {x}[{sub}] /= {k}
x[sub] of itself: {x}[{sub}] = {x}[{sub}] * 2
x[sub].add_: {x}[{sub}].add_({k})
x[sub].copy_: {x}[{sub}].copy_({r})
x[..., :2] += k: {x}[..., :2] += {k}
x[mask] = k: {x}[{x} > 0.3] = {k}
x[0] += x[-1]: {x}[0] += {x}[-1]
x[0].mul_: {x}[0].mul_({k})
chunk add_: {x}.chunk(2, {d})[0].add_({k})
split mul_: {x}.split(1, {d})[-1].mul_({k})
unbind tanh_: {x}.unbind({d})[0].tanh_()
narrow zero_: {x}.narrow({d}, 0, 1).zero_()
select copy_: {x}.select({d}, 0).copy_({x}.select({d}, -1) * 2)
unfold add_: {x}.unfold({d}, 1, 1).add_({k})
transpose mul_: {x}.transpose({d}, {e}).mul_({k})
index_add_: {x}.index_add_({d}, {rows}, {x}.index_select({d}, {rows}).sin())
index_copy_: {x}.index_copy_({d}, {row}, {s}.index_select({d}, {row}) * 2)
index_fill_: {x}.index_fill_({d}, {row}, {k})
index_put_: {x}.index_put_(({row0},), {s}[{row0}].cos())
scatter_: {x}.scatter_({d}, {s}.argsort({d}), {s} * 2)
scatter_add_: {x}.scatter_add_({d}, {s}.argsort({d}), {s} * 2)
for row in x: for row in {x}: row.mul_({k})
cumsum_: {x}.cumsum_({d})
swap rows: {x}[0], {x}[-1] = {x}[-1].clone(), {x}[0].clone()
move a row: {x}[0] = {x}[-1]
row by row: for i in range({x}.shape[0]): {x}[i] = {x}[i] * (i + 1)
x[sub] = a row: {x}[0] = {x}[{sub}].sum()
softmax then mul_: {x}.copy_({x}.softmax({d}))
unsqueeze_: {x}.unsqueeze_(0)
squeeze_: {x}.squeeze_()
cumprod_: {x}.cumprod_({d})
renorm_: {x}.renorm_(2, {d}, 0.7)
scatter_reduce_: {x}.scatter_reduce_({d}, {s}.argsort({d}), {s}, "sum")
index_put_ add: {x}.index_put_(({row0},), {s}[{row0}].cos(), accumulate=True)
select then x[...] =: {x}.select({d}, 0)[...] = {k}
select then +=: {x}[0][..., -1] += {k}
setitem: {x}.__setitem__(0, {x}[-1] * 2)
setitem of operator: operator.setitem({x}, 0, {k})
swapped halves: {x}[:] = torch.cat([{x}[1:], {x}[:1]])
numbers in a row: {x}[0] = {k}
a list in a row: {x}[..., :1] = torch.tensor([{k}])
""",
        dims=1,
        in_place=True,
    ),
    *_table(
        """
mT add_: {x}.mT.add_({k})
mH[0] mul_: {x}.mH[0].mul_({k})
diagonal add_: {x}.diagonal().add_({k})
diagonal fill_: {x}.diagonal(0, {d}, {e}).fill_({k})
hsplit mul_: {x}.hsplit([1])[0].mul_({k})
permute mul_: {x}.permute({perm})[0].mul_({k})
tril_: {x}.tril_()
triu_: {x}.triu_(1)
t_: {x}.flatten(0, -2).t_().mul_({k})
swapaxes_: {x}.swapaxes_({d}, {e})
T add_: {x}.flatten(0, -2).T.add_({k})
fill_diagonal_: {x}.flatten(0, -2).fill_diagonal_({k})
view_as_complex mul_: torch.view_as_complex({x}.view({pairs})).mul_(0.5 + 0.5j)
transpose_: {x}.transpose_({d}, {e})
addmm_: {x}.flatten(0, -2).addmm_({s}.flatten(0, -2).sin(), {W})
""",
        dims=2,
        in_place=True,
    ),
]

PURE = [*ARITHMETIC, *POINTWISE, *REDUCTIONS, *INDEXING, *LINEAR, *FRESH, *SPELLINGS]
OPS = [*PURE, *VIEWS, *IN_PLACE, *COMPLEX]
