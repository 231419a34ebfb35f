"""Lets the CUDA build of torchvision be imported beside a torch without CUDA (`make vllm` runs this file).

transformers and vLLM import its transforms, which are Python. Its operators are in a library that needs CUDA and cannot
be loaded; `import torchvision` fails because they are not declared. They are declared here, without an implementation.
"""

import importlib.util
from pathlib import Path

MARK = "# operators without an implementation\n"
_ROIS = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_SIZES = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_POOLED = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_STEPS = (
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
    "SymInt groups, SymInt offset_groups, bool use_mask"
)
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_ROIS}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_POOLED}, {_SIZES}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool({_ROIS}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_POOLED}, {_SIZES}) -> Tensor",
    f"ps_roi_align({_ROIS}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOLED}, int sampling_ratio, {_SIZES})"
    " -> Tensor",
    f"ps_roi_pool({_ROIS}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOLED}, {_SIZES}) -> Tensor",
    f"deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, {_STEPS}) -> Tensor",
    "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    f"{_STEPS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def main() -> None:
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    file = Path(found.origin)
    text = file.read_text()
    if not text.startswith(MARK):
        lines = [MARK, "import torch\n", '_declared = torch.library.Library("torchvision", "DEF")\n']
        lines += [f"_declared.define({operator!r})\n" for operator in OPERATORS]
        file.write_text("".join(lines) + text)


if __name__ == "__main__":
    main()
