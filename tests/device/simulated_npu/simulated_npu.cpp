// An NPU that is host memory: torch's PrivateUse1 device with an allocator that counts, streams and events that are
// numbers, operators of the CPU, and a collective backend `hccl` that is Gloo but refuses tensors of the host.
//
// It is for tests of the paths that only an accelerator takes. It is strict where a device is:
// - the host cannot touch its memory (memory.hpp);
// - a copy to pinned memory with non_blocking arrives at the wait for it, one from pinned memory reads until then;
// - streams and collectives have no order without a wait (order.hpp);
// - a collective takes tensors of the device alone.
// Kernels run when they are called: what a missing wait would do is told by the order, not by wrong numbers.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/extension.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <set>

#include "memory.hpp"
#include "order.hpp"

using namespace at;

namespace sim {

constexpr auto PU = c10::DeviceType::PrivateUse1;
constexpr int MOST = 16;  // devices

int count() {
  static int found = [] {
    auto given = getenv("SIMULATED_NPU_DEVICES");
    return given ? std::min(atoi(given), MOST) : 2;
  }();
  return found;
}

thread_local int current = 0;
thread_local int64_t current_stream[MOST] = {0};
thread_local bool in_fallback = false;  // copies of the simulation itself do not count
std::atomic<int64_t> next_stream{1};
int64_t key_of(int device, int64_t stream) { return ((int64_t)device << 32) | stream; }
int64_t here(int device) { return key_of(device, current_stream[device]); }
std::atomic<int64_t> used[MOST], peak[MOST];
std::atomic<int64_t> to_device{0}, to_host{0}, on_device{0}, blocking{0}, unpinned{0}, bytes_to_device{0}, bytes_to_host{0};
std::atomic<int64_t> bytes_unpinned{0};
std::mutex lock;
std::set<void*> pinned;
std::map<std::string, int64_t> operators, collectives;

// ---------------------------------------------------------------- memory

struct Block {
  size_t offset, bytes;
  int device;
  int64_t stream;
  std::vector<int64_t> recorded{};  // streams of record_stream
};

void free_block(void* held) {
  auto block = (Block*)held;
  used[block->device] -= block->bytes;
  for (auto stream : block->recorded) order().forget(block->offset, stream);
  if (block->bytes) pages().give_back(block->stream, block->offset, block->bytes);
  delete block;
}

Block* block_of(const c10::DataPtr& memory) {
  TORCH_CHECK(memory.get_deleter() == &free_block, "this is no memory of a device");
  return (Block*)memory.get_context();
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = current;
    auto offset = bytes ? pages().take(here(device), bytes) : 0;
    void* memory = bytes ? pages().device + offset : nullptr;
    auto now = used[device] += bytes;
    int64_t before = peak[device];
    while (now > before && !peak[device].compare_exchange_weak(before, now)) {
    }
    return {memory, new Block{offset, bytes, device, here(device)}, &free_block, c10::Device(PU, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(pages().visible(to), pages().visible(from), bytes);
  }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(PU, &device_memory);

void free_pinned(void* memory) {
  {
    std::lock_guard<std::mutex> held(lock);
    pinned.erase(memory);
  }
  free(memory);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    if (bytes) TORCH_CHECK(!posix_memalign(&memory, 64, bytes), "out of memory");
    std::lock_guard<std::mutex> held(lock);
    pinned.insert(memory);
    return {memory, memory, &free_pinned, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedMemory pinned_memory;

// ---------------------------------------------------------------- copies that end later

struct Late {  // a copy to (arrives later) or from (is still read) pinned memory
  Tensor pinned, value;
  bool arrives;
  int64_t stream, time;
};
std::vector<Late> late;  // in the order of their calls

void settle() {  // what the host has waited for
  std::vector<Late> now;
  {
    std::lock_guard<std::mutex> held(lock);
    auto waited = [](const Late& one) { return !order().is_done(one.stream, one.time); };
    auto first = std::stable_partition(late.begin(), late.end(), waited);
    std::move(first, late.end(), std::back_inserter(now));
    late.erase(first, late.end());
  }
  for (auto& copy : now) {
    if (copy.arrives) {
      copy.pinned.copy_(copy.value);
    } else {
      bool same = !memcmp(copy.pinned.data_ptr(), copy.value.data_ptr(), copy.value.nbytes());
      TORCH_CHECK(same, "missing wait: the host writes pinned memory that a copy to the device reads");
    }
  }
}

void host_waits(const Clock& clock) {
  order().host_waits(clock);
  settle();
}

void host_waits_for_device(int device) { host_waits(order().everything(key_of(device, 0), key_of(device + 1, 0) - 1)); }

// ---------------------------------------------------------------- devices, streams, events

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = PU;
  static c10::DeviceIndex index(c10::Device device) { return device.index() < 0 ? current : device.index(); }
  static c10::Stream stream(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(PU, index(device)), id);
  }
  c10::DeviceType type() const override { return PU; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return {PU, (c10::DeviceIndex)current}; }
  void setDevice(c10::Device device) const override {
    if (device.index() < 0) return;
    TORCH_CHECK(device.index() < count(), "npu:", (int)device.index(), " of ", count());
    current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return stream(device, current_stream[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override { return stream(device, next_stream++); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream given) const override {
    auto old = getStream(given.device());
    current_stream[given.device_index()] = given.id();
    return old;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  void record(void** event, const c10::Stream& given, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    ((Event*)*event)->clock = order().now(key_of(given.device_index(), given.id()));
    ((Event*)*event)->time = std::chrono::steady_clock::now();
  }
  void block(void* event, const c10::Stream& given) const override {
    order().stream_waits(key_of(given.device_index(), given.id()), ((Event*)event)->clock);
  }
  bool queryEvent(void* event) const override {
    host_waits(((Event*)event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override { host_waits(((Event*)event)->clock); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(((Event*)end)->time - ((Event*)start)->time).count();
  }
  bool queryStream(const c10::Stream& given) const override {
    synchronizeStream(given);
    return true;
  }
  void synchronizeStream(const c10::Stream& given) const override {
    host_waits(order().now(key_of(given.device_index(), given.id())));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { host_waits_for_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& given) const override {
    if (memory.get()) block_of(memory)->recorded.push_back(key_of(given.device_index(), given.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return count(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    int old = current;
    if (device >= 0) current = device;
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* memory) const override {
    std::lock_guard<std::mutex> held(lock);
    auto next = pinned.upper_bound((void*)memory);
    return next != pinned.begin() && *std::prev(next) == memory;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void*) const override { return {PU, (c10::DeviceIndex)current}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto held = storage.unsafeGetStorageImpl();
    int old = current;
    current = storage.device().index();
    auto fresh = device_memory.allocate(bytes);
    auto kept = std::min(bytes, held->nbytes());
    if (kept && held->mutable_data()) device_memory.copy_data(fresh.get(), held->mutable_data(), kept);
    held->set_data_ptr_noswap(std::move(fresh));
    held->set_nbytes(bytes);
    current = old;
  }
};
Hooks hooks;

// ---------------------------------------------------------------- operators

Tensor on_host(const Tensor& given) {  // the same memory as a tensor of the CPU
  auto options = given.options().device(kCPU).requires_grad(false);
  return at::from_blob(pages().visible(given.data_ptr()), given.sizes(), given.strides(), [given](void*) {}, options);
}

std::vector<Range> bytes_of(const Tensor& given) {
  if (!given.defined() || given.device().type() != PU || !given.numel()) return {};
  size_t length = 1;
  for (int64_t axis = 0; axis < given.dim(); axis++) length += (given.size(axis) - 1) * given.stride(axis);
  size_t begin = given.storage_offset() * given.itemsize();
  return {{block_of(given.storage().data_ptr())->offset, begin, begin + length * given.itemsize()}};
}

std::vector<Range> bytes_of(const std::vector<Tensor>& given) {
  std::vector<Range> found;
  for (auto& one : given)
    for (auto& range : bytes_of(one)) found.push_back(range);
  return found;
}

int device_of(const std::vector<Tensor>& given, int otherwise) {
  for (auto& one : given)
    if (one.defined() && one.device().type() == PU) return one.device().index();
  return otherwise;
}

struct Chosen {  // another device until the end of a function
  int old = current;
  explicit Chosen(std::optional<Device> device) {
    if (!device || device->index() < 0) return;
    TORCH_CHECK(device->index() < count(), "there is no npu:", (int)device->index());
    current = device->index();
  }
  ~Chosen() { current = old; }
};

constexpr auto KEYS = c10::DispatchKey::PrivateUse1;

Tensor empty_memory_format(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
                           std::optional<Device> device, std::optional<bool>, std::optional<MemoryFormat> format) {
  Chosen chosen(device);
  auto type = dtype.value_or(at::get_default_dtype_as_scalartype());
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(KEYS), type, format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef strides, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  Chosen chosen(device);
  auto type = dtype.value_or(at::get_default_dtype_as_scalartype());
  return at::detail::empty_strided_generic(size, strides, &device_memory, c10::DispatchKeySet(KEYS), type);
}

void copy_on_device(const Tensor& from, const Tensor& to) {
  auto source = here(from.device().index()), target = here(to.device().index());
  order().stream_waits(source, order().now(target));  // as copies between two devices do
  order().work(source, "a copy", bytes_of(from), bytes_of(to));
  order().stream_waits(target, order().now(source));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool device_from = from.device().type() == PU, device_to = to.device().type() == PU;
  bool later = false;
  int64_t stream = here((device_to ? to : from).device().index()), time = 0;
  if (in_fallback) {
  } else if (device_from && device_to) {
    on_device++;
    copy_on_device(from, to);
  } else if (device_to) {
    to_device++;
    bytes_to_device += from.nbytes();
    time = order().work(stream, "a copy", {}, bytes_of(to));
    later = non_blocking && hooks.isPinnedPtr(from.storage().data());
    if (later) {
      std::lock_guard<std::mutex> held(lock);
      auto read = from.contiguous();
      if (read.is_same(from)) late.push_back({from, from.clone(), false, stream, time});
    }
  } else {
    bool fixed = hooks.isPinnedPtr(to.storage().data());
    to_host++;
    bytes_to_host += from.nbytes();
    blocking += !non_blocking;
    unpinned += !fixed;
    bytes_unpinned += fixed ? 0 : from.nbytes();
    time = order().work(stream, "a copy", bytes_of(from), {});
    later = non_blocking && fixed;
    if (later) {
      std::lock_guard<std::mutex> held(lock);
      late.push_back({to, on_host(from).clone(), true, stream, time});
      return to;
    }
  }
  if (!in_fallback && !(device_from && device_to) && !later) host_waits(order().now(stream));
  auto target = device_to ? on_host(to) : to;
  target.copy_(device_from ? on_host(from) : from);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_output(to, from.sizes());
  return copy_from(from, to, false);
}

Scalar local_scalar_dense(const Tensor& given) {
  auto stream = here(given.device().index());
  order().work(stream, "item", bytes_of(given), {});
  host_waits(order().now(stream));
  return on_host(given).item();
}

const Tensor& resize_(const Tensor& given, c10::SymIntArrayRef size, std::optional<MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  int64_t elements = 1;
  for (auto one : sizes) elements *= one;
  size_t bytes = (elements + given.storage_offset()) * given.itemsize();
  if (bytes > given.storage().nbytes()) hooks.resizePrivateUse1Bytes(given.storage(), bytes);
  given.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return given;
}

Tensor& set_storage(Tensor& given, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef strides) {
  auto held = given.unsafeGetTensorImpl();
  held->set_storage_keep_dtype(storage);
  held->set_storage_offset(offset);
  if (strides.empty() && size.size()) {
    held->set_sizes_contiguous(size);
  } else {
    held->set_sizes_and_strides(size, strides);
  }
  return given;
}

Tensor& set_source(Tensor& given, Storage storage) {
  return set_storage(given, storage, 0, {(int64_t)(storage.nbytes() / given.itemsize())}, {});
}

Tensor& set_tensor(Tensor& given, const Tensor& other) {
  return set_storage(given, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

void record_stream(Tensor& given, c10::Stream stream) {
  Guard().recordDataPtrOnStream(given.storage().data_ptr(), stream);
}

// As torch_npu has it: `parameter.data = moved` keeps tied parameters tied.
bool compatible(const Tensor&, const Tensor&) { return true; }

void add_tensors(std::vector<Tensor>& to, const IValue& given) {
  if (given.isTensor()) {
    to.push_back(given.toTensor());
  } else if (given.isTensorList()) {
    for (const Tensor& one : given.toTensorVector()) to.push_back(one);
  } else if (given.isOptionalTensorList()) {
    for (const std::optional<Tensor>& one : given.toOptionalTensorList())
      if (one) to.push_back(*one);
  }
}

void fallback(const c10::OperatorHandle& called, torch::jit::Stack* stack) {
  {
    std::lock_guard<std::mutex> held(lock);
    operators[called.schema().name()]++;
  }
  auto& schema = called.schema();
  std::vector<Tensor> read, written;
  auto given = torch::jit::last(stack, schema.arguments().size());
  for (size_t number = 0; number < given.size(); number++) {
    auto alias = schema.arguments()[number].alias_info();
    add_tensors(alias && alias->isWrite() ? written : read, given[number]);
  }
  auto reads = bytes_of(read);
  bool outer = in_fallback;
  in_fallback = true;
  try {
    at::native::cpu_fallback(called, stack);
  } catch (...) {
    in_fallback = outer;
    throw;
  }
  in_fallback = outer;
  if (outer) return;
  auto returned = torch::jit::last(stack, schema.returns().size());
  for (auto& one : returned) add_tensors(written, one);
  auto stream = here(device_of(written, device_of(read, current)));
  order().work(stream, schema.name(), reads, bytes_of(written));
  bool to_host = std::any_of(returned.begin(), returned.end(), [](auto& one) { return one.isScalar(); });
  if (to_host) host_waits(order().now(stream));  // the caller gets a number or a bool
}

int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // the plain one
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(at::native::view));
  m.impl("_reshape_alias",
         static_cast<Tensor (*)(const Tensor&, IntArrayRef, IntArrayRef)>(at::native::_reshape_alias));
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize_);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", compatible);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Tensor", set_tensor);
}

// ---------------------------------------------------------------- collectives

struct Done : c10d::Work {  // the work is done; who uses its tensors must wait all the same
  Done(std::vector<Tensor> in, std::vector<Tensor> out, int device, int64_t stream)
      : c10d::Work(-1, c10d::OpType::UNKNOWN), in_(std::move(in)), out_(std::move(out)), device_(device) {
    clock_ = order().now(key_of(device, stream));
    std::vector<c10::Device> devices{c10::Device(PU, (c10::DeviceIndex)device)};
    auto type = c10::ListType::create(c10::TensorType::get());
    future_ = c10::make_intrusive<c10::ivalue::Future>(type, devices);
    std::swap(stream, current_stream[device]);  // the future records its events there
    future_->markCompleted(IValue(out_));
    current_stream[device] = stream;
  }
  bool isCompleted() override {
    host_waits(clock_);
    return true;
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override { order().stream_waits(here(device_), clock_); }
  std::vector<Tensor> result() override { return out_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<Tensor> in_, out_;  // not freed before the end of the work
  int device_;
  Clock clock_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

using Working = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;

struct HCCL final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  int64_t stream = next_stream++;  // of its work, on every device
  HCCL(c10::intrusive_ptr<c10d::Backend> given, int rank, int size) : c10d::Backend(rank, size), gloo(given) {}
  ~HCCL() override {
    if (PyGILState_Check()) {  // Gloo joins its threads, which may want the interpreter's lock
      pybind11::gil_scoped_release released;
      gloo.reset();
    }
  }
  const std::string getBackendName() const override { return "hccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  Working endCoalescing() override { return c10::make_intrusive<Done>(Tensors{}, Tensors{}, current, stream); }
  void setTimeout(std::chrono::milliseconds) override {}
  void abort() override { gloo->abort(); }
  void shutdown() override {}

  void note(const char* name) {
    std::lock_guard<std::mutex> held(lock);
    collectives[name]++;
  }
  Tensor host(const Tensor& given) {
    TORCH_CHECK(given.device().type() == PU, "hccl: a tensor on ", given.device());
    TORCH_CHECK(given.is_contiguous(), "hccl: a tensor that is not contiguous");
    return on_host(given);
  }
  Tensors host(const Tensors& given) {
    Tensors found;
    for (auto& one : given) found.push_back(host(one));
    return found;
  }
  std::vector<Tensors> host(const std::vector<Tensors>& given) {
    std::vector<Tensors> found;
    for (auto& one : given) found.push_back(host(one));
    return found;
  }
  Tensors flat(const std::vector<Tensors>& given) {
    Tensors found;
    for (auto& one : given) found.insert(found.end(), one.begin(), one.end());
    return found;
  }
  Working done(const char* name, Tensors in, Tensors out) {  // in the group's own stream, behind the caller's
    int device = device_of(out, device_of(in, current));
    auto key = key_of(device, stream);
    order().stream_waits(key, order().now(here(device)));
    order().work(key, name, bytes_of(in), bytes_of(out));
    return c10::make_intrusive<Done>(std::move(in), std::move(out), device, stream);
  }

  Working broadcast(Tensors& given, const c10d::BroadcastOptions& options) override {
    note("broadcast");
    auto mine = host(given);
    gloo->broadcast(mine, options)->wait();
    bool root = options.rootRank == rank_;
    return done("broadcast", root ? given : Tensors{}, root ? Tensors{} : given);
  }
  void sum(Tensors& mine, c10d::AllreduceOptions options) {  // Gloo has no mean
    bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    if (mean) options.reduceOp = c10d::ReduceOp::SUM;
    gloo->allreduce(mine, options)->wait();
    for (auto& one : mine)
      if (mean) one.div_(size_);
  }
  Working allreduce(Tensors& given, const c10d::AllreduceOptions& options) override {
    note("allreduce");
    auto mine = host(given);
    sum(mine, options);
    return done("allreduce", {}, given);
  }
  Working reduce(Tensors& given, const c10d::ReduceOptions& options) override {
    note("reduce");
    auto mine = host(given);
    gloo->reduce(mine, options)->wait();
    return done("reduce", {}, given);
  }
  Working allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    note("allgather");
    auto mine = host(out);
    auto sent = host(in);
    gloo->allgather(mine, sent, options)->wait();
    return done("allgather", in, flat(out));
  }
  Working _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions&) override {
    note("_allgather_base");
    std::vector<Tensors> mine{host(out).view(-1).chunk(size_)};
    Tensors sent{host(in).view(-1).clone()};
    gloo->allgather(mine, sent, c10d::AllgatherOptions())->wait();
    return done("_allgather_base", {in}, {out});
  }
  Working gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    note("gather");
    auto mine = host(out);
    auto sent = host(in);
    gloo->gather(mine, sent, options)->wait();
    return done("gather", in, flat(out));
  }
  Working scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    note("scatter");
    auto mine = host(out);
    auto sent = host(in);
    gloo->scatter(mine, sent, options)->wait();
    return done("scatter", flat(in), out);
  }
  Working _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    note("_reduce_scatter_base");
    Tensors whole{host(in).view(-1).clone()};
    c10d::AllreduceOptions how;
    how.reduceOp = options.reduceOp;
    sum(whole, how);
    host(out).view(-1).copy_(whole[0].chunk(size_)[rank_]);
    return done("_reduce_scatter_base", {in}, {out});
  }
  Working alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                        const c10d::AllToAllOptions& options) override {
    note("alltoall_base");
    auto mine = host(out), sent = host(in);
    gloo->alltoall_base(mine, sent, out_sizes, in_sizes, options)->wait();
    return done("alltoall_base", {in}, {out});
  }
  Working send(Tensors& given, int to, int tag) override {
    note("send");
    auto mine = host(given);
    gloo->send(mine, to, tag)->wait();
    return done("send", given, {});
  }
  Working recv(Tensors& given, int from, int tag) override {
    note("recv");
    auto mine = host(given);
    gloo->recv(mine, from, tag)->wait();
    return done("recv", {}, given);
  }
  Working barrier(const c10d::BarrierOptions& options) override {
    note("barrier");
    gloo->barrier(options)->wait();
    return done("barrier", {}, {});
  }
};

std::map<std::string, int64_t> copies() {
  return {{"to_device", to_device}, {"to_host", to_host}, {"on_device", on_device}, {"blocking", blocking},
          {"unpinned", unpinned}, {"bytes_to_device", bytes_to_device}, {"bytes_to_host", bytes_to_host},
          {"bytes_unpinned", bytes_unpinned}};
}

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(&sim::hooks);
  m.def("count", &sim::count);
  m.def("set_device", [](int device) {
    TORCH_CHECK(device < sim::count(), "there is no npu:", device);
    sim::current = device;
  });
  m.def("current_device", [] { return sim::current; });
  m.def("synchronize", &sim::host_waits_for_device);
  m.def("used", [](int device) { return sim::used[device].load(); });
  m.def("peak", [](int device) { return sim::peak[device].load(); });
  m.def("reset_peak", [](int device) { sim::peak[device] = sim::used[device].load(); });
  m.def("operators", [] { return sim::operators; });
  m.def("collectives", [] { return sim::collectives; });
  m.def("copies", &sim::copies);
  m.def("make_backend", [](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
                            -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<sim::HCCL>(gloo, rank, size);
  });
}
