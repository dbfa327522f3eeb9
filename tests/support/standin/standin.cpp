// A device type of its own for tests: torch's PrivateUse1, "standin" by name.
//
// Tensors of the device lie in host memory, and the CPU's kernels compute every operator. An operator that is given
// tensors of two devices is refused, as CUDA refuses it, and so is a random number generator of another device.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <cstring>

namespace {

constexpr c10::DeviceType TYPE = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(TYPE, 0);
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// ---- One device with one stream, on which everything has happened when a call returns.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream(DEVICE); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(DEVICE); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* begin = c10::alloc_cpu(std::max<size_t>(bytes, 1));
    return {begin, begin, &c10::free_cpu, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
HostMemory memory;
REGISTER_ALLOCATOR(TYPE, &memory);

// ---- Random numbers have a state of their own, so that code which keeps only the CPU's is noticed.

struct Generator final : c10::GeneratorImpl {
  explicit Generator(at::Generator made) : GeneratorImpl(DEVICE, KEYS), cpu(std::move(made)) {}
  Generator() : Generator(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(cpu.clone()); }

  at::Generator cpu;  // draws the numbers: kernels of the CPU take no other
};

const at::Generator& default_generator() {
  static at::Generator generator = at::make_generator<Generator>();
  return generator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto grown = memory.allocate(bytes);
    std::memcpy(grown.get(), impl->data(), std::min(impl->nbytes(), bytes));
    impl->set_data_ptr_noswap(std::move(grown));
    impl->set_nbytes(bytes);
  }
};
Hooks hooks;

// ---- What makes a tensor of the device, copies it, or looks at it in another way.

// The same memory as a tensor of the CPU, for as long as `tensor` lives.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  auto options = tensor.options().device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, options, at::kCPU);
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           KEYS, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) { return at::_local_scalar_dense(on_cpu(self)); }

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> begin;
  if (offset) begin = offset->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), begin);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  // As in torch: a view of that size stays a view.
  if (impl->sizes() == sizes) return self;
  impl->set_sizes_contiguous(sizes);
  size_t bytes = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (self.storage().nbytes() < bytes) hooks.resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  TORCH_CHECK(storage.device() == DEVICE, "set_ of a tensor on standin:0 with a storage on ", storage.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

at::Tensor& set_source(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  int64_t size = storage.nbytes() / self.itemsize();
  return set_storage(self, std::move(storage), 0, c10::SymInt(size), c10::SymInt(1));
}

// 0 is the plain formula, which is made of operators that are checked one by one.
int64_t fused_sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;
}

// torch asks each new device for a convolution of its own, forward and backward.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  TORCH_CHECK(input.device() == weight.device(), "Expected all tensors to be on the same device");
  std::optional<at::Tensor> added;
  if (bias) added = on_cpu(*bias);
  return at::convolution_symint(on_cpu(input), on_cpu(weight), added, stride, padding, dilation, transposed,
                                output_padding, groups).to(DEVICE);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> wanted) {
  TORCH_CHECK(gradient.device() == weight.device(), "Expected all tensors to be on the same device");
  c10::SymInt channels = gradient.sym_size(1);
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      on_cpu(gradient), on_cpu(input), on_cpu(weight), c10::SymIntArrayRef(channels), stride, padding, dilation,
      transposed, output_padding, groups, wanted);
  auto back = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(DEVICE) : tensor; };
  return {back(of_input), back(of_weight), back(of_bias)};
}

// ---- Everything else: check the devices, then let the CPU compute.

struct Devices {
  bool ours = false;
  bool cpu = false;

  // As in CUDA, numbers may be tensors of the CPU without a dimension.
  void see(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    ours |= tensor.is_privateuseone();
    cpu |= tensor.is_cpu() && tensor.dim() > 0;
  }
  // As in CUDA, places to read or write (`x[places]`) may be on the CPU, if what they index is on the device.
  void see_index(const at::Tensor& tensor) {
    if (tensor.defined()) ours |= tensor.is_privateuseone();
  }
};

void check_devices(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  Devices seen;
  for (const auto& argument : arguments) {
    if (argument.isTensor()) {
      seen.see(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) seen.see(tensor);
    } else if (argument.isOptionalTensorList()) {
      // Only `index` and `index_put` have these.
      for (const auto& tensor : argument.toOptionalTensorVector()) if (tensor) seen.see_index(*tensor);
    } else if (argument.isDevice()) {
      seen.ours |= argument.toDevice().type() == TYPE;
    }
  }
  TORCH_CHECK(!(seen.ours && seen.cpu), "Expected all tensors to be on the same device, but ",
              op.schema().operator_name(), " was given tensors on standin:0 and on cpu");
}

// Kernels of the CPU draw from the generator of the CPU that is inside ours.
void replace_generators(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& parameters = op.schema().arguments();
  auto arguments = torch::jit::last(stack, parameters.size());
  for (size_t at = 0; at < parameters.size(); at++) {
    const auto& type = *parameters[at].type();
    bool optional = type.kind() == c10::TypeKind::OptionalType;
    auto kind = optional ? type.expectRef<c10::OptionalType>().getElementType()->kind() : type.kind();
    if (kind != c10::TypeKind::GeneratorType) continue;
    auto& place = (*stack)[stack->size() - parameters.size() + at];
    const at::Generator given = arguments[at].isNone() ? default_generator() : arguments[at].toGenerator();
    TORCH_CHECK(given.device().type() == TYPE, "Expected a 'standin' device type for generator but found '",
                given.device().type(), "' in ", op.schema().operator_name());
    place = static_cast<Generator*>(given.unsafeGetGeneratorImpl())->cpu;
  }
}

void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_devices(op, torch::jit::last(stack, op.schema().arguments().size()));
  replace_generators(op, stack);
  // A view would come back as a copy, and writes to it would be lost: such an operator needs an entry below.
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_source);
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

// ---- Mixed precision: which operators run in 16 bits and which in 32, as on CUDA.

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

namespace at::autocast {
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_BY_DEFAULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_BY_DEFAULT)
  AT_FORALL_PROMOTE(PROMOTE)
}
}  // namespace at::autocast

// ---- What Python needs to register the device.

TORCH_LIBRARY(standin, m) {
  m.def("register_hooks() -> ()", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("default_generator() -> Generator?", [] { return default_generator(); });
}
